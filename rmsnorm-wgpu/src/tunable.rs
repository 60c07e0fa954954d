//! This backend's tuning table, for `rmsnorm tune`.

use rmsnorm_spec::{DType, Norm, Problem};
use rmsnorm_tuning::{Calls, Entry, Identity, Kind, Slot, Table, Tunable};

use crate::WgpuBackend;
use crate::plan::{self, KEPT, Layout, Name, PAIR, Tuning, candidates};

impl Tunable for WgpuBackend {
    fn identity(&self) -> Identity {
        WgpuBackend::identity(self).clone()
    }

    fn built_in(&self) -> Table {
        Tuning::H200.to_table()
    }

    fn with_table(&self, table: &Table) -> Result<Self, String> {
        Ok(self.with_tuning(KEPT.keep(Tuning::from_table(table)?)))
    }

    fn planned(&self, problem: &Problem) -> String {
        format!("{:?}", plan::plan(problem, &Layout::dense(problem), self.caps()))
    }

    fn slots(&self) -> Vec<Slot> {
        let slot = |name: Name| Slot { name: name.text(), columns: PAIR, calls: calls(name), shapes: vec![] };
        Name::all().into_iter().map(slot).collect()
    }

    fn candidates(&self, slot: &Slot, _above: u32, _up_to: u32, best: &Entry) -> Vec<Entry> {
        let name = Name::all().into_iter().find(|name| name.text() == slot.name && !best.is_none());
        name.map(candidates::entries).unwrap_or_default()
    }
}

/// The calls that measure a ladder.
fn calls(name: Name) -> Vec<Calls> {
    let of = |kind, norm, dtype| Calls { kind, norm, dtype };
    match name {
        Name::Forward(0) => [Kind::Forward, Kind::AddForward].map(|kind| of(kind, Norm::Rms, DType::Bf16)).to_vec(),
        Name::Forward(1) => vec![of(Kind::Forward, Norm::Layer, DType::Bf16)],
        Name::Forward(2) => vec![of(Kind::AddForward, Norm::Layer, DType::Bf16)],
        Name::Forward(_) => Norm::USUAL.map(|norm| of(Kind::Forward, norm, DType::F32)).to_vec(),
        Name::ToCodes => [Kind::ToCodes, Kind::ToCodesByRow].map(|kind| of(kind, Norm::Rms, DType::Bf16)).to_vec(),
        Name::Backward(0) => vec![of(Kind::Backward, Norm::Rms, DType::Bf16)],
        Name::Backward(1) => vec![of(Kind::Backward, Norm::Layer, DType::Bf16)],
        Name::Backward(2) => Norm::USUAL.map(|norm| of(Kind::Backward, norm, DType::F16)).to_vec(),
        Name::Backward(_) => Norm::USUAL.map(|norm| of(Kind::Backward, norm, DType::F32)).to_vec(),
    }
}
