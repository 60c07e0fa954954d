//! Selects the table that a backend uses.

use std::env;
use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};

use crate::file::{FileMismatch, Identity, Read};
use crate::{Table, folder};

/// Environment variable that selects the table. `off`: the built-in table. A path: the table of
/// that file, which must match the device. Not set or empty: the table in the cache folder if it
/// matches, otherwise the built-in one.
pub const VARIABLE: &str = "RMSNORM_TUNING";

/// The origin of the table in use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TuningSource {
    /// The built-in table; no other was found or requested.
    BuiltIn,
    /// The built-in table, because the file in the cache folder cannot be used.
    Ignored {
        /// The file.
        path: PathBuf,
        /// Why it cannot be used.
        reason: String,
    },
    /// The table of this file.
    File {
        /// The file.
        path: PathBuf,
        /// When the table was measured.
        made: String,
    },
    /// A table that the program passed, to measure it.
    Tried,
}

/// `built in`, `PATH of DATE`, or `built in; PATH ignored: REASON`.
impl fmt::Display for TuningSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TuningSource::BuiltIn => f.write_str("built in"),
            TuningSource::Ignored { path, reason } => write!(f, "built in; {} ignored: {reason}", path.display()),
            TuningSource::File { path, made } => write!(f, "{} of {made}", path.display()),
            TuningSource::Tried => f.write_str("being tried"),
        }
    }
}

/// A backend's table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chosen<T> {
    /// `None`: the built-in table.
    pub table: Option<T>,
    /// Where it comes from.
    pub source: TuningSource,
}

/// Selects the table for a device, following [`VARIABLE`]. `check` converts a table to the
/// backend's form and refuses illegal rungs.
///
/// # Errors
/// A message, if `RMSNORM_TUNING` names a file that cannot be used. A file in the cache folder
/// never causes an error.
pub fn choose<T>(identity: &Identity, check: impl Fn(&Table) -> Result<T, String>) -> Result<Chosen<T>, String> {
    let cached = path_of(identity);
    choose_by(identity, env::var_os(VARIABLE), cached.as_deref(), check)
}

/// The path at which `rmsnorm tune` writes a device's table. `None` if the user has no cache
/// folder.
pub fn path_of(identity: &Identity) -> Option<PathBuf> {
    Some(folder::of_user(identity.backend)?.join(identity.file_name()))
}

fn choose_by<T>(
    identity: &Identity,
    variable: Option<OsString>,
    cached: Option<&Path>,
    check: impl Fn(&Table) -> Result<T, String>,
) -> Result<Chosen<T>, String> {
    let built_in = |source| Ok(Chosen { table: None, source });
    let read = |path: &Path| {
        let Read { table, made } = identity.read(path)?;
        Ok((check(&table).map_err(FileMismatch::Because)?, made))
    };
    let asked_for = variable.filter(|value| !value.is_empty());
    if asked_for.as_ref().is_some_and(|value| value == "off") {
        return built_in(TuningSource::BuiltIn);
    }
    let (path, is_asked_for) = match (&asked_for, cached) {
        (Some(path), _) => (Path::new(path), true),
        (None, Some(path)) => (path, false),
        (None, None) => return built_in(TuningSource::BuiltIn),
    };
    match (read(path), is_asked_for) {
        (Ok((table, made)), _) => {
            Ok(Chosen { table: Some(table), source: TuningSource::File { path: path.to_owned(), made } })
        }
        (Err(FileMismatch::Absent), false) => built_in(TuningSource::BuiltIn),
        (Err(FileMismatch::Absent), true) => Err(format!("{VARIABLE} names {}, which does not exist", path.display())),
        // The variable applies to all backends, so a table of another backend is skipped.
        (Err(FileMismatch::OtherBackend(_)), true) => built_in(TuningSource::BuiltIn),
        (Err(FileMismatch::OtherBackend(other)), false) => {
            let reason = format!("it is for the backend {other:?}");
            built_in(TuningSource::Ignored { path: path.to_owned(), reason })
        }
        (Err(FileMismatch::Because(reason)), false) => {
            built_in(TuningSource::Ignored { path: path.to_owned(), reason })
        }
        (Err(FileMismatch::Because(reason)), true) => Err(format!("{VARIABLE} names {}: {reason}", path.display())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::write;

    fn identity() -> Identity {
        Identity {
            backend: "test",
            device: "device".into(),
            driver: "1".into(),
            library: "2".into(),
            kernels: "3".into(),
        }
    }

    fn table(bytes: u64) -> Table {
        Table { numbers: [("bytes".to_owned(), bytes)].into(), ladders: Default::default() }
    }

    fn chosen(variable: Option<&Path>, cached: Option<&Path>) -> Result<(Option<u64>, String), String> {
        let check = |table: &Table| table.number("bytes", 0, 10);
        let chosen = choose_by(&identity(), variable.map(|path| path.as_os_str().to_owned()), cached, check)?;
        Ok((chosen.table, chosen.source.to_string()))
    }

    /// Precedence: `off`, the named file, the file in the cache folder, the built-in table.
    #[test]
    fn the_environment_comes_before_the_cache() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name);
        let (named, cached, stale, illegal, others) =
            (at("named"), at("cached"), at("stale"), at("illegal"), at("others"));
        let text = |identity: Identity, bytes| identity.text(&table(bytes), "today");
        write(&named, &text(identity(), 1)).expect("a file");
        write(&cached, &text(identity(), 2)).expect("a file");
        write(&stale, &text(Identity { kernels: "0".into(), ..identity() }, 3)).expect("a file");
        write(&illegal, &text(identity(), 11)).expect("a file");
        write(&others, &text(Identity { backend: "cuda", ..identity() }, 4)).expect("a file");
        let of = |path: &Path| format!("{} of today", path.display());
        let ignored = |path: &Path, reason: &str| Ok((None, format!("built in; {} ignored: {reason}", path.display())));
        let built_in = || Ok((None, "built in".to_owned()));
        let refused = |path: &Path, reason: &str| Err(format!("RMSNORM_TUNING names {}{reason}", path.display()));

        assert_eq!(chosen(Some(Path::new("off")), Some(&cached)), built_in());
        assert_eq!(chosen(Some(&named), Some(&cached)), Ok((Some(1), of(&named))));
        assert_eq!(chosen(None, Some(&cached)), Ok((Some(2), of(&cached))));
        assert_eq!(chosen(Some(Path::new("")), Some(&cached)), Ok((Some(2), of(&cached))));
        assert_eq!(chosen(None, None), built_in());
        assert_eq!(chosen(None, Some(&at("absent"))), built_in());
        let (of_kernels, of_bytes) = (
            "it is for the kernels \"0\", here is \"3\": run `rmsnorm tune` again",
            "bytes is 11, which is not from 0 to 10",
        );
        assert_eq!(chosen(None, Some(&stale)), ignored(&stale, of_kernels));
        assert_eq!(chosen(None, Some(&illegal)), ignored(&illegal, of_bytes));
        assert_eq!(chosen(None, Some(&others)), ignored(&others, "it is for the backend \"cuda\""));
        assert_eq!(chosen(Some(&stale), Some(&cached)), refused(&stale, &format!(": {of_kernels}")));
        assert_eq!(chosen(Some(&illegal), Some(&cached)), refused(&illegal, &format!(": {of_bytes}")));
        assert_eq!(chosen(Some(&at("absent")), Some(&cached)), refused(&at("absent"), ", which does not exist"));
        assert_eq!(chosen(Some(&others), Some(&cached)), built_in());
    }
}
