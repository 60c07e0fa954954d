//! Tuned numbers that do not change results: the bytes that are worth a thread, and the size from
//! which outputs bypass the cache.

use std::fs::File;
use std::io::Read as _;
use std::sync::OnceLock;

use rmsnorm_tuning::file::revision;
use rmsnorm_tuning::{Chosen, Identity, Table, TuningSource, choose};

/// The tuned numbers of plans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tuning {
    /// Bytes read and written that are worth another thread.
    pub(crate) min_task_bytes: usize,
    /// Tasks per thread, so that an interrupted thread does not delay the others.
    pub(crate) tasks_per_thread: usize,
    /// Outputs of at least this many bytes bypass the cache, because they would not stay in it.
    pub(crate) streaming_bytes: usize,
}

/// Each number's name, minimum and maximum. Changing `REVISION` invalidates older tables.
pub(crate) const MIN_TASK_BYTES: (&str, u64, u64) = ("min_task_bytes", 1 << 14, 1 << 30);
pub(crate) const TASKS_PER_THREAD: (&str, u64, u64) = ("tasks_per_thread", 1, 64);
pub(crate) const STREAMING_BYTES: (&str, u64, u64) = ("streaming_bytes", 1 << 14, 1 << 40);
const REVISION: &str = "1";

impl Tuning {
    /// The built-in numbers. Handing work to a second thread costs 12 to 17 us, in which one thread
    /// moves about 1 MiB. 512x1024 f32 takes 57 us on one thread and 69 us on two (Zen 5,
    /// 2026-11-21).
    pub(crate) const ZEN5: Tuning = Tuning { min_task_bytes: 1 << 20, tasks_per_thread: 4, streaming_bytes: 8 << 20 };

    /// The numbers as a table.
    pub(crate) fn to_table(self) -> Table {
        let Tuning { min_task_bytes, tasks_per_thread, streaming_bytes } = self;
        let numbers = [
            (MIN_TASK_BYTES.0, min_task_bytes),
            (TASKS_PER_THREAD.0, tasks_per_thread),
            (STREAMING_BYTES.0, streaming_bytes),
        ];
        Table {
            numbers: numbers.map(|(name, number)| (name.to_owned(), number as u64)).into(),
            ladders: Default::default(),
        }
    }

    /// The numbers of a table, if all are in range.
    ///
    /// # Errors
    /// A text that names the number out of range and its limits.
    pub(crate) fn from_table(table: &Table) -> Result<Tuning, String> {
        table.has_no_more_than(&Tuning::ZEN5.to_table())?;
        let number = |(name, least, most): (&str, u64, u64)| {
            let number = table.number(name, least, most)?;
            usize::try_from(number)
                .map_err(|_| format!("{name} must be at most {} on this platform, got {number}", usize::MAX))
        };
        Ok(Tuning {
            min_task_bytes: number(MIN_TASK_BYTES)?,
            tasks_per_thread: number(TASKS_PER_THREAD)?,
            streaming_bytes: number(STREAMING_BYTES)?,
        })
    }

    /// The tuning chosen by this process's environment, read once.
    pub(crate) fn of_process() -> &'static Result<(Tuning, TuningSource), String> {
        static CHOSEN: OnceLock<Result<(Tuning, TuningSource), String>> = OnceLock::new();
        CHOSEN.get_or_init(|| {
            let Chosen { table, source } = choose(&identity(), Tuning::from_table)?;
            Ok((table.unwrap_or(Tuning::ZEN5), source))
        })
    }
}

/// The identity of tables for this machine: its processor, with any number of threads.
pub(crate) fn identity() -> Identity {
    let built_in = Tuning::ZEN5.to_table().to_string();
    Identity {
        backend: "cpu",
        device: format!("{}, {}", processor().unwrap_or_else(|| "processor unknown".into()), std::env::consts::ARCH),
        driver: std::env::consts::OS.into(),
        library: "none".into(),
        kernels: revision([built_in.as_str(), env!("CARGO_PKG_VERSION"), REVISION]),
    }
}

/// The processor's name, if the system reports it.
fn processor() -> Option<String> {
    let mut start = Vec::new();
    // The first processor's name is in the first page. On a machine with hundreds of processors,
    // reading the whole file takes milliseconds.
    File::open("/proc/cpuinfo").ok()?.take(4096).read_to_end(&mut start).ok()?;
    let start = String::from_utf8_lossy(&start);
    let name = start.lines().find(|line| line.starts_with("model name"))?.split_once(':')?.1.trim().to_owned();
    (!name.is_empty()).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_built_in_is_legal_and_reads_back() {
        assert_eq!(Tuning::from_table(&Tuning::ZEN5.to_table()), Ok(Tuning::ZEN5));
    }

    #[test]
    fn numbers_beyond_their_limits_are_refused() {
        for (name, least, most) in [MIN_TASK_BYTES, TASKS_PER_THREAD, STREAMING_BYTES] {
            for (number, is_legal) in
                [(least, true), (most, true), (least - 1, false), (most + 1, false), (u64::MAX, false)]
            {
                let mut table = Tuning::ZEN5.to_table();
                table.numbers.insert(name.to_owned(), number);
                let tuning = Tuning::from_table(&table);
                assert_eq!(tuning.is_ok(), is_legal, "{tuning:?}");
                assert!(is_legal || tuning.is_err_and(|reason| reason.contains(name)));
            }
        }
        let mut table = Tuning::ZEN5.to_table();
        table.numbers.insert("colour".into(), 1);
        assert_eq!(Tuning::from_table(&table), Err("unknown ladder or number \"colour\"".into()));
    }
}
