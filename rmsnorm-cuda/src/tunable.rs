//! This backend's tables, for `rmsnorm tune`.

use rmsnorm_spec::{DType, Norm, Problem};
use rmsnorm_tuning::{Calls, Entry, Identity, Kind, Slot, Table, Tunable, TuningSource, VALUE};

use crate::plan::candidates::tiles;
use crate::plan::{self, KEPT, Name, SPLIT_BYTES, Tile, Tuning, Which};
use crate::{CudaBackend, launch};

/// Candidates for [`Tuning::split_bytes`], in MiB.
const SPLIT_MIB: [u32; 7] = [0, 2, 5, 10, 15, 20, 30];

/// Shapes for which a split call is about as fast as partial sums.
const SPLIT_SHAPES: [(usize, usize); 6] =
    [(128, 4096), (512, 4096), (1024, 1024), (1024, 2048), (512, 8192), (1024, 4096)];

impl Tunable for CudaBackend {
    fn identity(&self) -> Identity {
        self.kernels().identity().clone()
    }

    fn built_in(&self) -> Table {
        Tuning::H200.to_table()
    }

    fn with_table(&self, table: &Table) -> Result<Self, String> {
        let tuning = KEPT.keep(Tuning::from_table(table)?);
        Ok(self.with_kernels(self.kernels().with_tuning(tuning, TuningSource::Tried)))
    }

    fn planned(&self, problem: &Problem) -> String {
        format!("{:?}", plan::plan(problem, launch::dense_access_bytes(problem), self.kernels().caps()))
    }

    fn slots(&self) -> Vec<Slot> {
        // The search of a scale must have the threads of the kernel that writes the codes, so it is
        // not tuned.
        let ladders = Name::all().into_iter().filter(|name| name.which != Which::FindsScale);
        let slot =
            |name: Name| Slot { name: name.text(), columns: name.pack() as usize, calls: calls(name), shapes: vec![] };
        let backward = Calls { kind: Kind::Backward, norm: Norm::Rms, dtype: DType::Bf16 };
        let split = Slot { name: SPLIT_BYTES.into(), columns: 0, calls: vec![backward], shapes: SPLIT_SHAPES.to_vec() };
        ladders.map(slot).chain([split]).collect()
    }

    fn candidates(&self, slot: &Slot, _above: u32, up_to: u32, best: &Entry) -> Vec<Entry> {
        let Some(name) = Name::all().into_iter().find(|name| name.text() == slot.name) else {
            return SPLIT_MIB.map(|mib| Entry::none().with(VALUE, mib << 20)).to_vec();
        };
        if best.is_none() {
            return Vec::new();
        }
        tiles(name, up_to, self.kernels().caps()).into_iter().map(Tile::to_entry).collect()
    }

    fn other_forms(&self) -> Vec<Self> {
        vec![self.with_large_plans()]
    }
}

/// The calls that a ladder is measured with.
fn calls(name: Name) -> Vec<Calls> {
    let dtype = if name.pack() == 8 { DType::Bf16 } else { DType::F32 };
    let of = |kind, norm| Calls { kind, norm, dtype };
    match name.which {
        Which::Forward(0, _) => vec![of(Kind::Forward, Norm::Rms)],
        Which::Forward(1, _) => vec![of(Kind::AddForward, Norm::Rms)],
        Which::Forward(2, _) => vec![of(Kind::Forward, Norm::Layer)],
        Which::Forward(..) => vec![of(Kind::AddForward, Norm::Layer)],
        Which::Backward(0, _) => vec![of(Kind::Backward, Norm::Rms)],
        Which::Backward(..) => vec![of(Kind::Backward, Norm::Layer)],
        Which::ToCodes(1) => vec![of(Kind::ToCodesByRow, Norm::Rms)],
        Which::ToCodes(2) => vec![of(Kind::ToCodesByBlock, Norm::Rms)],
        Which::ToCodes(3) => vec![of(Kind::ToCodes, Norm::Layer), of(Kind::ToCodesByRow, Norm::Layer)],
        Which::ToCodes(_) | Which::FindsScale => vec![of(Kind::ToCodes, Norm::Rms)],
    }
}
