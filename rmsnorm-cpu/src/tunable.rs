//! This backend's table, for `rmsnorm tune`.

use rmsnorm_spec::{DType, Norm, Problem};
use rmsnorm_tuning::{Calls, Entry, Identity, Kind, Slot, Table, Tunable, VALUE};

use crate::tuning::{MIN_TASK_BYTES, STREAMING_BYTES, TASKS_PER_THREAD, Tuning, identity};
use crate::{CpuBackend, plan};

/// Outputs of 4 to 64 MiB.
const STREAMING_SHAPES: &[(usize, usize)] = &[(1024, 1024), (2048, 1024), (4096, 1024), (16_384, 1024)];

/// Calls with 512 KiB to 4 MiB per tensor.
const TASK_SHAPES: &[(usize, usize)] = &[(128, 1024), (256, 1024), (512, 1024), (1024, 1024)];

/// Calls with work for every thread.
const THREAD_SHAPES: &[(usize, usize)] = &[(2048, 1024), (8192, 1024)];

impl Tunable for CpuBackend {
    fn identity(&self) -> Identity {
        identity()
    }

    fn built_in(&self) -> Table {
        Tuning::ZEN5.to_table()
    }

    fn with_table(&self, table: &Table) -> Result<Self, String> {
        Ok(self.with_tuning(Tuning::from_table(table)?))
    }

    fn planned(&self, problem: &Problem) -> String {
        format!("{:?}", plan::plan(problem, self.caps()))
    }

    fn slots(&self) -> Vec<Slot> {
        let calls = [Kind::Forward, Kind::Backward].map(|kind| Calls { kind, norm: Norm::Rms, dtype: DType::F32 });
        let slot = |name: &str, shapes: &[(usize, usize)]| Slot {
            name: name.into(),
            columns: 0,
            calls: calls.to_vec(),
            shapes: shapes.to_vec(),
        };
        vec![
            slot(STREAMING_BYTES.0, STREAMING_SHAPES),
            slot(MIN_TASK_BYTES.0, TASK_SHAPES),
            slot(TASKS_PER_THREAD.0, THREAD_SHAPES),
        ]
    }

    fn candidates(&self, slot: &Slot, _above: u32, _up_to: u32, _best: &Entry) -> Vec<Entry> {
        let value = |number: u32| Entry::none().with(VALUE, number);
        let name = slot.name.as_str();
        if name == TASKS_PER_THREAD.0 {
            [1, 2, 4, 8, 16].map(value).to_vec()
        } else if name == MIN_TASK_BYTES.0 {
            (17..=23).map(|bits| value(1 << bits)).collect()
        } else {
            (21..=28).map(|bits| value(1 << bits)).collect()
        }
    }
}
