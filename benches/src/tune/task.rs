//! Tasks of the tuner: a rung, and representative shapes of the calls that look it up.

use rmsnorm_core::DType;
use rmsnorm_tuning::{Calls, Entry, Kind, Rung, Slot, Table, VALUE};

use super::{Request, asks_for};
use crate::{Measurable, Op, Operation, Quant, Shape, workload_bytes};

/// Common row lengths, the most common first.
const POPULAR: [usize; 32] = [
    4096, 8192, 5120, 2048, 7168, 1024, 3072, 2560, 16384, 12288, 128, 14336, 6144, 3584, 1536, 768, 512, 256, 10240,
    64, 28672, 32768, 1280, 640, 384, 192, 2880, 18432, 20480, 24576, 65536, 131_072,
];

/// The largest number of bytes of a matrix of a large call; several matrices exceed all caches.
/// Long rows get more bytes, since with few rows the last partial wave of blocks decides.
const LARGE_BYTES: usize = 64 << 20;
const LONG_COLS: usize = 16_384;
const LARGE_BYTES_OF_LONG: usize = 4 * LARGE_BYTES;

/// The rows of a small call, the bytes of a matrix of a medium call of forward, the rows of one of
/// backward, and the row lengths that are measured with them. A medium call of forward fills the
/// device once or twice: there idle lanes and few rows at a time cost most.
const SMALL_ROWS: usize = 128;
const MEDIUM_BYTES: usize = 8 << 20;
const MEDIUM_ROWS: usize = 512;
const SMALL_COLS: std::ops::RangeInclusive<usize> = 1024..=16_384;

/// Models do not have longer rows.
const MOST_SPLIT_COLS: usize = 1 << 17;

/// The largest number of measured row lengths of a rung.
const MOST_COLS: usize = 2;

/// A rung of a ladder, or a number of the table.
#[derive(Clone, Debug)]
pub(super) struct Task {
    pub(super) slot: Slot,
    /// The rung's index in its ladder; `None` for a number.
    pub(super) rung: Option<usize>,
    /// (exclusive lower, inclusive upper) row length, in the ladder's units.
    pub(super) lengths: (u32, u32),
    pub(super) built_in: Entry,
    pub(super) subjects: Vec<Subject>,
    /// The sort key: lower ranks are tuned first.
    rank: (bool, usize, usize),
}

/// A measured call and its weight.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Subject {
    pub(super) operation: Operation,
    pub(super) dtype: DType,
    pub(super) shape: Shape,
    pub(super) weight: f64,
}

impl Task {
    /// The name of a rung, `16.forward.rms.block 385..512`, or of a number.
    pub(super) fn name(&self) -> String {
        let (above, up_to) = self.lengths;
        match self.rung {
            Some(_) => format!("{} {}..{up_to}", self.slot.name, u64::from(above) + 1),
            None => self.slot.name.clone(),
        }
    }

    /// Replaces the built-in entry in a table.
    pub(super) fn put(&self, table: &mut Table, entry: &Entry) {
        match self.rung {
            Some(rung) => {
                let rungs = table.ladders.get_mut(&self.slot.name);
                if let Some(rung) = rungs.and_then(|rungs| rungs.get_mut(rung)) {
                    rung.best = entry.clone();
                }
            }
            None => {
                let value = entry.number(VALUE).map(u64::from);
                if let (Some(number), Ok(value)) = (table.numbers.get_mut(&self.slot.name), value) {
                    *number = value;
                }
            }
        }
    }
}

/// The tasks of a request, the most common calls first.
pub(super) fn all<D: Measurable>(device: &D, table: &Table, request: &Request) -> Vec<Task> {
    let mut tasks = Vec::new();
    for mut slot in device.slots() {
        slot.calls.retain(|calls| asks_for(&request.kinds, &calls.kind) && asks_for(&request.dtypes, &calls.dtype));
        if slot.calls.is_empty() {
            continue;
        }
        match (table.ladders.get(&slot.name), table.numbers.get(&slot.name)) {
            (Some(rungs), _) => {
                let mut above = 0;
                for (rung, entry) in rungs.iter().enumerate() {
                    let lengths = (above, entry.up_to);
                    above = entry.up_to;
                    if !entry.best.is_none() {
                        tasks.extend(of_rung(device, &slot, rung, lengths, &entry.best, request));
                    }
                }
            }
            (None, Some(number)) => tasks.extend(of_number(device, &slot, *number, request)),
            (None, None) => {}
        }
    }
    tasks.sort_by_key(|task| task.rank);
    tasks
}

/// The table with more rungs: each is split at 4, 5, 6 and 7 times powers of two columns, so that a
/// measured length represents its rung.
pub(super) fn split<D: Measurable>(device: &D, table: &Table) -> Table {
    let mut split = table.clone();
    for slot in device.slots().iter().filter(|slot| slot.columns > 0) {
        let Some(rungs) = split.ladders.get_mut(&slot.name) else { continue };
        let mut above = 0;
        let mut all = Vec::new();
        for rung in rungs.iter() {
            let best = if rung.best.is_none() { vec![] } else { limits(above, rung.up_to, slot.columns) };
            all.extend(best.into_iter().chain([rung.up_to]).map(|up_to| Rung { up_to, best: rung.best.clone() }));
            above = rung.up_to;
        }
        *rungs = all;
    }
    split
}

/// Where a rung for lengths above `above` and up to `up_to` is split. A unit of length has `columns`
/// columns.
fn limits(above: u32, up_to: u32, columns: usize) -> Vec<u32> {
    let quarters = (0..29).flat_map(|bits| (4..8u32).map(move |quarters| quarters << bits));
    let all = [1, 2, 3].into_iter().chain(quarters);
    // Very short rows, and rows longer than any model's, are not split.
    let is_usual = |limit: &u32| (16..=MOST_SPLIT_COLS).contains(&(*limit as usize * columns));
    all.filter(|limit| (above + 1..up_to).contains(limit)).filter(is_usual).collect()
}

/// Joins neighbouring rungs that [`split`] has made and that have equal entries.
pub(super) fn join(table: &mut Table, built_in: &Table) {
    for (name, rungs) in &mut table.ladders {
        let known = built_in.ladders.get(name).map(Vec::as_slice).unwrap_or_default();
        let mut joined: Vec<Rung> = Vec::new();
        for rung in rungs.drain(..) {
            match joined.last_mut() {
                Some(last) if last.best == rung.best && known.iter().all(|known| known.up_to != last.up_to) => {
                    last.up_to = rung.up_to;
                }
                Some(_) | None => joined.push(rung),
            }
        }
        *rungs = joined;
    }
}

fn of_rung<D: Measurable>(
    device: &D,
    slot: &Slot,
    rung: usize,
    lengths: (u32, u32),
    best: &Entry,
    request: &Request,
) -> Option<Task> {
    let columns = |length: u32| (length as usize).saturating_mul(slot.columns);
    let (above, up_to) = (columns(lengths.0), columns(lengths.1));
    let is_of = |cols: &usize| (above + 1..=up_to).contains(cols);
    let mut cols: Vec<usize> = if request.cols.is_empty() {
        POPULAR.into_iter().filter(is_of).collect()
    } else {
        request.cols.iter().copied().filter(is_of).collect()
    };
    // A rung without common lengths is measured at its longest row, unless the request lists
    // columns.
    if cols.is_empty() && request.cols.is_empty() && up_to <= 1 << 20 {
        cols.push(up_to);
    }
    cols.truncate(MOST_COLS);
    let first = *cols.first()?;
    let mut subjects = Vec::new();
    for &calls in &slot.calls {
        for &cols in &cols {
            subjects.push(large(device, calls, cols));
        }
    }
    let calls = *slot.calls.first()?;
    if SMALL_COLS.contains(&first) && matches!(calls.kind, Kind::Forward | Kind::AddForward | Kind::Backward) {
        // At about this number of rows backward begins to divide columns, not only rows, among
        // blocks.
        let is_backward = calls.kind == Kind::Backward;
        let medium = if is_backward { MEDIUM_ROWS } else { MEDIUM_BYTES / calls.dtype.size() / first };
        let of_rows = |rows| subject(calls, Shape { rows, cols: first }, 0.5);
        let others = if medium == SMALL_ROWS { vec![medium] } else { vec![SMALL_ROWS, medium] };
        subjects.extend(others.into_iter().map(of_rows));
    }
    let task = task(device, slot, subjects)?;
    let popularity = POPULAR.iter().position(|popular| *popular == first).unwrap_or(POPULAR.len());
    let rank = (calls.dtype != DType::Bf16, popularity, kind_rank(calls.kind));
    Some(Task { rung: Some(rung), lengths, built_in: best.clone(), rank, ..task })
}

fn of_number<D: Measurable>(device: &D, slot: &Slot, number: u64, request: &Request) -> Option<Task> {
    let shapes = slot.shapes.iter().map(|&(rows, cols)| Shape { rows, cols });
    let shapes = shapes.filter(|shape| asks_for(&request.cols, &shape.cols));
    let subjects = shapes.flat_map(|shape| slot.calls.iter().map(move |calls| subject(*calls, shape, 1.0)));
    let task = task(device, slot, subjects.collect())?;
    let built_in = Entry::none().with(VALUE, u32::try_from(number).unwrap_or(u32::MAX));
    Some(Task { built_in, rank: (false, 4, 0), ..task })
}

/// A task with the subjects that the device has room for; `None` if there are none.
fn task<D: Measurable>(device: &D, slot: &Slot, mut subjects: Vec<Subject>) -> Option<Task> {
    subjects.retain(|Subject { operation, dtype, shape, .. }| {
        device.admit(*shape, workload_bytes(device, *shape, *dtype, &[*operation])).is_ok()
    });
    let task = Task {
        slot: slot.clone(),
        rung: None,
        lengths: (0, 0),
        built_in: Entry::none(),
        subjects,
        rank: (true, usize::MAX, usize::MAX),
    };
    (!task.subjects.is_empty()).then_some(task)
}

fn large<D: Measurable>(device: &D, calls: Calls, cols: usize) -> Subject {
    let most = if cols > LONG_COLS { LARGE_BYTES_OF_LONG } else { LARGE_BYTES };
    let bytes = most.min(device.sweep_bytes());
    let rows = (bytes / calls.dtype.size() / cols).max(1);
    let rows = if rows < 64 { rows } else { rows / 64 * 64 };
    subject(calls, Shape { rows, cols }, 1.0)
}

fn subject(calls: Calls, shape: Shape, weight: f64) -> Subject {
    let Calls { kind, norm, dtype } = calls;
    let operation = Operation::new(norm, op(kind));
    Subject { operation, dtype, shape, weight }
}

const fn op(kind: Kind) -> Op {
    match kind {
        Kind::Forward => Op::Forward,
        Kind::AddForward => Op::AddForward,
        Kind::Backward => Op::Backward,
        Kind::ToCodes => Op::QuantizedForward(Quant::Tensor),
        Kind::ToCodesByRow => Op::QuantizedForward(Quant::Row),
        Kind::ToCodesByBlock => Op::QuantizedForward(Quant::Block128),
    }
}

fn kind_rank(kind: Kind) -> usize {
    Kind::ALL.iter().position(|known| *known == kind).unwrap_or(Kind::ALL.len())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rmsnorm_core::cpu::CpuBackend;
    use rmsnorm_tuning::Tunable;

    use super::*;

    fn request() -> Request {
        Request { kinds: vec![], cols: vec![], dtypes: vec![], budget: Duration::ZERO, jobs: 1 }
    }

    #[test]
    fn numbers_are_tasks_with_the_shapes_that_they_decide_about() {
        let device = CpuBackend::new();
        let tasks = all(&device, &device.built_in(), &request());
        let names: Vec<String> = tasks.iter().map(Task::name).collect();
        assert_eq!(names, ["streaming_bytes", "min_task_bytes", "tasks_per_thread"]);
        assert!(tasks.iter().all(|task| task.subjects.len() >= 4), "{tasks:?}");
        let only = Request { kinds: vec![Kind::Backward], cols: vec![1024], ..request() };
        let tasks = all(&device, &device.built_in(), &only);
        let ops = || tasks.iter().flat_map(|task| &task.subjects).map(|subject| subject.operation.op);
        assert!(ops().count() > 0 && ops().all(|op| op == Op::Backward));
        assert!(all(&device, &device.built_in(), &Request { cols: vec![7], ..request() }).is_empty());
    }

    /// A table with one ladder, of an invented backend.
    fn ladder(rungs: &[(u32, u32)]) -> Table {
        let rung = |&(up_to, packs): &(u32, u32)| Rung {
            up_to,
            best: if packs == 0 { Entry::none() } else { Entry::none().with("packs", packs) },
        };
        Table { numbers: Default::default(), ladders: [("l".to_owned(), rungs.iter().map(rung).collect())].into() }
    }

    #[test]
    fn a_rung_is_split_at_quarters_of_powers_of_two() {
        assert_eq!(limits(384, 1024, 8), [448, 512, 640, 768, 896]);
        assert!(limits(96, 112, 8).is_empty());
        assert_eq!(limits(0, 6, 8), [2, 3, 4, 5]);
        // Of 16 and of 131072 columns, but not of 14 and of 163840.
        assert_eq!(limits(0, 10, 2), [8]);
        assert_eq!(limits(1 << 16, u32::MAX, 1), [5 << 14, 6 << 14, 7 << 14, 1 << 17]);
    }

    #[test]
    fn limits_that_part_equals_go() {
        let built_in = ladder(&[(96, 5), (128, 5), (1024, 2)]);
        let mut table = ladder(&[(16, 5), (96, 5), (128, 5), (256, 2), (512, 3), (1024, 3)]);
        join(&mut table, &built_in);
        assert_eq!(table, ladder(&[(96, 5), (128, 5), (256, 2), (1024, 3)]));
        let mut same = built_in.clone();
        join(&mut same, &built_in);
        assert_eq!(same, built_in);
    }

    #[test]
    fn an_entry_takes_the_built_in_ones_place() {
        let device = CpuBackend::new();
        let mut table = device.built_in();
        let tasks = all(&device, &table, &request());
        tasks[1].put(&mut table, &Entry::none().with(VALUE, 1 << 19));
        assert_eq!(table.numbers["min_task_bytes"], 1 << 19);
        assert!(device.with_table(&table).is_ok());
    }
}
