//! This backend's table, for `rmsnorm tune`.

use rmsnorm_spec::{DType, Norm};
use rmsnorm_tuning::{Calls, Entry, Identity, Kind, Slot, Table, Tunable};

use crate::CpuBackend;
use crate::tuning::{MIN_TASK_BYTES, STREAMING_BYTES, TASKS_PER_THREAD, Tuning, identity};

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

    fn slots(&self) -> Vec<Slot> {
        let calls = [Kind::Forward, Kind::Backward].map(|kind| Calls { kind, norm: Norm::Rms, dtype: DType::Bf16 });
        let slot = |(name, ..): (&str, u64, u64)| Slot { name: name.into(), columns: 0, calls: calls.to_vec() };
        [STREAMING_BYTES, MIN_TASK_BYTES, TASKS_PER_THREAD].map(slot).to_vec()
    }

    fn candidates(&self, slot: &Slot, _above: u32, _up_to: u32, _best: &Entry) -> Vec<Entry> {
        let value = |number: u32| Entry::none().with("value", number);
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
