//! The file of a table. It is TOML, readable by people too, and is written atomically.

use std::io::{Read as _, Write as _};
use std::path::Path;
use std::{fs, io};

use serde::Deserialize;

use crate::Table;

/// Version of the file layout. Files of another version are refused.
const FORMAT: u32 = 1;

/// Longest file that is read, far above the size of any table.
const MOST_BYTES: u64 = 1 << 20;

/// The setup that a table is made for. A table is used only if all fields match.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The backend's name.
    pub backend: &'static str,
    /// The device, with the properties that decide which tile is best.
    pub device: String,
    /// The version of its driver.
    pub driver: String,
    /// The compiler of the kernels, with its version.
    pub library: String,
    /// Hash of the kernels and of the built-in table, by [`revision`].
    pub kernels: String,
}

/// The whole file.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Content {
    format: u32,
    backend: String,
    device: String,
    driver: String,
    library: String,
    rmsnorm: String,
    kernels: String,
    made: String,
    #[serde(default)]
    numbers: std::collections::BTreeMap<String, u64>,
    #[serde(default)]
    ladders: std::collections::BTreeMap<String, Vec<crate::Rung>>,
}

/// The layout version alone: other layouts may have other fields.
#[derive(Deserialize)]
struct Format {
    format: u32,
}

/// A table read from a file, and its date.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Read {
    /// The table; its rungs are not checked yet.
    pub table: Table,
    /// Date and time at which it was measured, in UTC.
    pub made: String,
}

/// Why a file is not used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FileMismatch {
    /// The file does not exist.
    Absent,
    /// The file is for this other backend.
    OtherBackend(String),
    /// The file is damaged, or was made for another setup. The text says how.
    Because(String),
}

impl Identity {
    /// The file's name in a cache folder. It is readable, and differs for each backend, device,
    /// driver and library. It does not depend on the kernels: the table of newer kernels replaces
    /// the old one.
    pub fn file_name(&self) -> String {
        let Identity { backend, device, driver, library, kernels: _ } = self;
        let readable: String = format!("{device} {driver} {library}")
            .chars()
            .map(
                |letter| {
                    if letter.is_ascii_alphanumeric() || letter == '.' { letter.to_ascii_lowercase() } else { '-' }
                },
            )
            .take(96)
            .collect();
        let readable: Vec<&str> = readable.split('-').filter(|word| !word.is_empty()).collect();
        let hash = &revision([device.as_str(), driver, library])[..8];
        format!("tuning-{backend}-{}-{hash}.toml", readable.join("-"))
    }

    /// The text of a file.
    pub fn text(&self, table: &Table, made: &str) -> String {
        let Identity { backend, device, driver, library, kernels } = self;
        let lines = [
            ("backend", *backend),
            ("device", device),
            ("driver", driver),
            ("library", library),
            ("rmsnorm", env!("CARGO_PKG_VERSION")),
            ("kernels", kernels),
            ("made", made),
        ];
        let header: String = lines.map(|(name, value)| format!("{name} = {}\n", toml::Value::from(value))).concat();
        format!(
            "# The fastest settings that `rmsnorm tune` measured on this device. They can change the last bits of\n\
             # results. RMSNORM_TUNING=off ignores this file, RMSNORM_TUNING=FILE pins it. `up_to` limits the\n\
             # length of a row, in the backend's units.\n\
             format = {FORMAT}\n{header}\n{table}"
        )
    }

    /// Reads a file and checks that it is for this setup.
    ///
    /// # Errors
    /// The reason why the file cannot be used.
    pub fn read(&self, path: &Path) -> Result<Read, FileMismatch> {
        let because = |reason: String| FileMismatch::Because(reason);
        let mut text = String::new();
        // Opening a pipe would block.
        if fs::metadata(path).is_ok_and(|found| !found.is_file()) {
            return Err(because("it is not a file".into()));
        }
        match fs::File::open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(FileMismatch::Absent),
            Err(error) => return Err(because(format!("it cannot be read: {error}"))),
            Ok(file) => {
                let read = file.take(MOST_BYTES + 1).read_to_string(&mut text);
                read.map_err(|error| because(format!("it cannot be read: {error}")))?;
            }
        }
        if text.len() as u64 > MOST_BYTES {
            return Err(because(format!("it has more than {MOST_BYTES} bytes")));
        }
        self.parse(&text)
    }

    /// Parses the text of a file and checks that it is for this setup.
    ///
    /// # Errors
    /// The reason why the text cannot be used.
    pub fn parse(&self, text: &str) -> Result<Read, FileMismatch> {
        let wrong = |error: toml::de::Error| {
            let line = error.span().map_or(1, |span| 1 + text[..span.start.min(text.len())].matches('\n').count());
            FileMismatch::Because(format!("line {line}: {}", error.message().lines().next().unwrap_or_default()))
        };
        let Format { format } = toml::from_str(text).map_err(wrong)?;
        if format != FORMAT {
            return Err(FileMismatch::Because(format!(
                "it has format {format}, this version reads {FORMAT}: run `rmsnorm tune` again"
            )));
        }
        let content: Content = toml::from_str(text).map_err(wrong)?;
        if content.backend != self.backend {
            return Err(FileMismatch::OtherBackend(content.backend));
        }
        let compared = [
            ("device", &content.device, &self.device),
            ("driver", &content.driver, &self.driver),
            ("library", &content.library, &self.library),
            ("kernels", &content.kernels, &self.kernels),
        ];
        if let Some((what, other, own)) = compared.into_iter().find(|(_, other, own)| other != own) {
            return Err(FileMismatch::Because(format!(
                "it is for the {what} {other:?}, here is {own:?}: run `rmsnorm tune` again"
            )));
        }
        Ok(Read { table: Table { numbers: content.numbers, ladders: content.ladders }, made: content.made })
    }
}

/// Writes a file atomically: first a temporary file, which is then renamed.
///
/// # Errors
/// Errors of the file system; an existing file then keeps its content.
pub fn write(path: &Path, text: &str) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs::create_dir_all(folder)?;
    let mut file = tempfile::Builder::new().prefix(".writing-").tempfile_in(folder)?;
    file.write_all(text.as_bytes())?;
    file.persist(path).map(|_| ()).map_err(|error| error.error)
}

/// A hash of texts, as 16 hexadecimal digits. It is not cryptographic.
pub fn revision<'a>(texts: impl IntoIterator<Item = &'a str>) -> String {
    format!("{:016x}", texts.into_iter().fold(NO_TEXT, hash))
}

/// The [`hash`] of no texts.
pub const NO_TEXT: u64 = 0xcbf2_9ce4_8422_2325;

/// Continues the hash `before` with one more text (FNV-1a, of Fowler, Noll and Vo).
pub const fn hash(before: u64, text: &str) -> u64 {
    const PRIME: u64 = 0x0100_0000_01b3;
    let (mut hash, bytes, mut at) = (before, text.as_bytes(), 0);
    while at < bytes.len() {
        hash = (hash ^ bytes[at] as u64).wrapping_mul(PRIME);
        at += 1;
    }
    // A separator: no UTF-8 text has this byte.
    (hash ^ 0xff).wrapping_mul(PRIME)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Entry, Rung};

    fn identity() -> Identity {
        Identity {
            backend: "test",
            device: "NVIDIA \"H200\"\\\n, 132 SMs".into(),
            driver: "13.0".into(),
            library: "NVRTC 13.0".into(),
            kernels: revision(["a", "b"]),
        }
    }

    fn table() -> Table {
        let rung = Rung { up_to: 8, best: Entry::none().with("threads", 32) };
        Table { numbers: [("bytes".to_owned(), 7)].into(), ladders: [("forward".to_owned(), vec![rung])].into() }
    }

    fn reason(text: &str) -> String {
        match identity().parse(text) {
            Err(FileMismatch::Because(reason)) => reason,
            other => format!("{other:?}"),
        }
    }

    #[test]
    fn a_file_reads_back() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("not/yet/there").join(identity().file_name());
        assert_eq!(identity().read(&path), Err(FileMismatch::Absent));
        write(&path, &identity().text(&table(), "today")).expect("a writable folder");
        assert_eq!(identity().read(&path), Ok(Read { table: table(), made: "today".into() }));
        let beside = fs::read_dir(path.parent().expect("a folder")).expect("a folder").count();
        assert_eq!(beside, 1, "nothing half-written stays");
    }

    #[test]
    fn a_name_is_readable_and_another_one_for_another_device() {
        let name = identity().file_name();
        assert!(
            name.starts_with("tuning-test-nvidia-h200-132-sms-13.0-nvrtc-13.0-") && name.ends_with(".toml"),
            "{name}"
        );
        assert_ne!(name, Identity { device: "NVIDIA H200, 132 SMs".into(), ..identity() }.file_name());
        assert_eq!(name, Identity { kernels: "later".into(), ..identity() }.file_name());
    }

    #[test]
    fn what_does_not_fit_is_refused_with_the_reason() {
        let good = identity().text(&table(), "today");
        for (from, to, words) in [
            ("format = 1", "format = 2", "it has format 2, this version reads 1"),
            ("format = 1", "", "missing field `format`"),
            ("13.0\"\nlib", "12.9\"\nlib", "it is for the driver \"12.9\", here is \"13.0\""),
            ("NVRTC 13.0", "NVRTC 13.1", "it is for the library \"NVRTC 13.1\", here is \"NVRTC 13.0\""),
            (&identity().kernels, "0", "it is for the kernels \"0\", here is"),
            ("132 SMs", "66 SMs", "it is for the device"),
            ("made =", "unmade =", "unknown field `unmade`"),
            ("threads = 32", "threads = -1", "line "),
            ("threads = 32", "threads = 4294967296", "line "),
            ("threads = 32", "threads = 1e3", "line "),
            ("threads = 32", "threads = { a = 1 }", "line "),
            ("up_to = 8", "up_to = 99999999999999999999", "line "),
            ("up_to = 8, ", "", "missing field `up_to`"),
            ("[ladders]", "[ladders", "line "),
        ] {
            assert!(good.contains(from), "{from}");
            let got = reason(&good.replace(from, to));
            assert!(got.contains(words), "{to}: {got}");
        }
        let other = good.replace("backend = \"test\"", "backend = \"cuda\"");
        assert_eq!(identity().parse(&other), Err(FileMismatch::OtherBackend("cuda".into())));
    }

    /// Truncates the file at every length, changes every byte, nests deeply, and reads binary data.
    #[test]
    fn a_damaged_file_never_panics() {
        let good = identity().text(&table(), "today");
        for end in 0..good.len() {
            let _: Result<Read, FileMismatch> = identity().parse(&good[..end]);
            for byte in ["0", "\"", "[", "\u{0}"] {
                let _: Result<Read, FileMismatch> =
                    identity().parse(&(good[..end].to_owned() + byte + &good[end + 1..]));
            }
        }
        let nested = format!("format = 1\na = {}", "[".repeat(100_000));
        assert!(reason(&nested).starts_with("line 2"));
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("table");
        for (bytes, words) in [(vec![0xff; 10], "it cannot be read"), (vec![b'#'; 2 << 20], "more than 1048576 bytes")]
        {
            fs::write(&path, bytes).expect("a writable folder");
            let read = identity().read(&path);
            assert!(matches!(&read, Err(FileMismatch::Because(reason)) if reason.contains(words)), "{read:?}");
        }
        assert_eq!(identity().read(folder.path()), Err(FileMismatch::Because("it is not a file".into())));
    }

    #[test]
    fn every_byte_and_every_end_of_a_text_counts() {
        let all = [revision(["ab", "c"]), revision(["a", "bc"]), revision(["abc"]), revision(["abd"]), revision([])];
        let different: std::collections::BTreeSet<_> = all.iter().collect();
        assert_eq!(different.len(), all.len());
    }
}
