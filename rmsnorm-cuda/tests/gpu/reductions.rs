//! Every way to sum weight gradients, from one group for all rows to more groups than rows.

use rmsnorm_conformance::Harness;
use rmsnorm_conformance::bounds::{Mode, Model, Statistics};
use rmsnorm_conformance::testing::{BackwardTruth, exact, values};
use rmsnorm_cuda::{
    Backward, CudaBackend, DriverFailure,
    spec::{Error, GradReduction, NormSpec, Tensor, bf16, reference::BackwardInputs},
};

use crate::support::Gpu;

/// The inputs of a call, and its expected results.
struct Case {
    norm: NormSpec,
    x: Vec<bf16>,
    dy: Vec<bf16>,
    mean: Vec<f32>,
    rstd: Vec<f32>,
    by_partials: BackwardTruth,
    in_any_order: BackwardTruth,
}

impl Case {
    fn new(rows: usize, cols: usize, gpu: &Gpu) -> Self {
        let norm = NormSpec::layer(rows, cols, 1e-5);
        let (x, dy) = (values::<bf16>(1, rows * cols), values::<bf16>(2, rows * cols));
        let mean: Vec<f32> = values(3, rows);
        let rstd: Vec<f32> = values(4, rows).into_iter().map(|value: f32| value.abs() + 0.5).collect();
        let inputs = BackwardInputs {
            dy: &exact(&dy),
            x: &exact(&x),
            weight: None,
            mean: &exact(&mean),
            rstd: &exact(&rstd),
            dresidual_out: None,
        };
        let arithmetic = gpu.arithmetic();
        let model = Model { arithmetic: &arithmetic, mode: Mode::Worst };
        let truth = |reduction| BackwardTruth::new(&norm, &inputs, Statistics::Given, reduction, model);
        let (by_partials, in_any_order) = (truth(GradReduction::Partials), truth(GradReduction::Atomics));
        Case { norm, x, dy, mean, rstd, by_partials, in_any_order }
    }

    /// The number of elements of dx, dweight and dbias that are out of bounds.
    fn wrong(&self, gpu: &CudaBackend, reduction: GradReduction) -> Result<usize, Error> {
        let (stream, cols) = (gpu.stream(), self.norm.cols);
        let (x, dy) = (stream.clone_htod(&self.x).unwrap(), stream.clone_htod(&self.dy).unwrap());
        let (mean, rstd) = (stream.clone_htod(&self.mean).unwrap(), stream.clone_htod(&self.rstd).unwrap());
        let mut dx = stream.alloc_zeros::<bf16>(self.x.len()).unwrap();
        let mut dweight = stream.alloc_zeros::<f32>(cols).unwrap();
        let mut dbias = stream.alloc_zeros::<f32>(cols).unwrap();
        let args = Backward::<bf16, f32, bf16>::mixed(dy.as_view(), x.as_view(), rstd.as_view(), dx.as_view_mut())
            .mean(mean.as_view())
            .dweight(dweight.as_view_mut())
            .dbias(dbias.as_view_mut())
            .grad_reduction(reduction);
        gpu.backward(&self.norm, args)?;
        let truth = if reduction == GradReduction::Partials { &self.by_partials } else { &self.in_any_order };
        let verdicts = [
            truth.judge(Tensor::Dx, &gpu.download(&dx)?),
            truth.judge(Tensor::Dweight, &gpu.download(&dweight)?),
            truth.judge(Tensor::Dbias, &gpu.download(&dbias)?),
        ];
        Ok(verdicts.iter().map(|verdict| verdict.failures + verdict.open).sum())
    }
}

#[test]
fn every_way_of_summing_is_within_bounds() {
    let Some(gpu) = Gpu::open() else { return };
    for (rows, cols) in [(1, 100), (2000, 96), (515, 4099), (70, 40000), (9, 300_000)] {
        let case = Case::new(rows, cols, &gpu);
        let locks = [1, 2, 7, 64, 4096, 1_000_000].map(|groups| GradReduction::Locks { groups });
        for reduction in locks.into_iter().chain([GradReduction::Atomics, GradReduction::Partials]) {
            assert_eq!(case.wrong(&gpu, reduction).unwrap(), 0, "{reduction:?}, {rows}x{cols}");
            // Small calls have no partial sums unless forced.
            assert_eq!(
                case.wrong(&gpu.with_large_plans(), reduction).unwrap(),
                0,
                "{reduction:?}, {rows}x{cols}, as if large"
            );
        }
    }
}

/// More groups than a device has memory for: a correct result or a typed error, and the next call
/// works.
#[test]
fn groups_without_end_are_right_or_out_of_memory() {
    let Some(gpu) = Gpu::open() else { return };
    let case = Case::new(300, 1024, &gpu);
    let large = gpu.with_large_plans();
    match case.wrong(&large, GradReduction::Locks { groups: u32::MAX }) {
        Ok(wrong) => assert_eq!(wrong, 0),
        Err(Error::Device { source, .. }) => {
            assert!(source.downcast_ref().is_some_and(DriverFailure::is_out_of_memory), "{source}");
        }
        Err(error) => panic!("{error}"),
    }
    assert_eq!(case.wrong(&large, GradReduction::Locks { groups: 16 }).unwrap(), 0);
}
