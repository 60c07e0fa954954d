//! The ways of summing weight gradients, from one group for all rows to more groups than rows.

use rmsnorm_conformance::{Arithmetic, Harness, bounds, judge};
use rmsnorm_cuda::{
    Backward, CudaBackend, DriverFailure,
    spec::{
        Element, Error, GradReduction, NormBackend, NormSpec, bf16,
        reference::{self, BackwardInputs},
    },
};

use crate::support::{Gpu, tensor};

/// A call on the host, with its reference and its bounds.
struct Case {
    norm: NormSpec,
    x: Vec<bf16>,
    dy: Vec<bf16>,
    mean: Vec<f32>,
    rstd: Vec<f32>,
    expected: reference::BackwardOutputs,
    errors: bounds::BackwardBounds,
}

impl Case {
    fn new(rows: usize, cols: usize, arithmetic: &Arithmetic) -> Self {
        let norm = NormSpec::layer(rows, cols, 1e-5);
        let (x, dy) = (tensor::<bf16>(1, rows * cols), tensor::<bf16>(2, rows * cols));
        let mean: Vec<f32> = tensor(3, rows);
        let rstd: Vec<f32> = tensor(4, rows).into_iter().map(|value: f32| value.abs() + 0.5).collect();
        let (wide_x, wide_dy, wide_mean, wide_rstd) = (wide(&x), wide(&dy), wide(&mean), wide(&rstd));
        let inputs = BackwardInputs {
            dy: &wide_dy,
            x: &wide_x,
            weight: None,
            mean: &wide_mean,
            rstd: &wide_rstd,
            dresidual_out: None,
        };
        let expected = reference::backward(&norm, &inputs);
        let model = bounds::Model { arithmetic, mode: bounds::Mode::Worst };
        let errors = bounds::backward(&norm, &inputs, &expected, bounds::Statistics::Given, model);
        Case { norm, x, dy, mean, rstd, expected, errors }
    }

    /// How many elements of dx, dweight and dbias are out of bounds.
    fn wrong(&self, gpu: &CudaBackend, reduction: GradReduction, arithmetic: &Arithmetic) -> Result<usize, Error> {
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
        let judge =
            |got, expected: &[f64], error: &[f64]| judge::judge::<f32>(got, expected, error, arithmetic).failures;
        let dx = judge::judge(&gpu.download(&dx)?, &self.expected.dx, &self.errors.dx, arithmetic).failures;
        Ok(dx
            + judge(&gpu.download(&dweight)?, &self.expected.dweight, &self.errors.dweight)
            + judge(&gpu.download(&dbias)?, &self.expected.dbias, &self.errors.dbias))
    }
}

fn wide<E: Element>(values: &[E]) -> Vec<f64> {
    values.iter().map(|value| f64::from(value.to_f32())).collect()
}

#[test]
fn every_way_of_summing_is_within_bounds() {
    let Some(gpu) = Gpu::open() else { return };
    // In whatever order rows arrive, a chain of additions is no longer than all of them.
    let any_order = Arithmetic { depth_rows: |rows| rows.saturating_sub(1), ..gpu.arithmetic() };
    for (rows, cols) in [(1, 100), (2000, 96), (515, 4099), (70, 40000), (9, 300_000)] {
        let case = Case::new(rows, cols, &any_order);
        let locks = [1, 2, 7, 64, 4096, 1_000_000].map(|groups| GradReduction::Locks { groups });
        for reduction in locks.into_iter().chain([GradReduction::Atomics, GradReduction::Partials]) {
            assert_eq!(case.wrong(&gpu, reduction, &any_order).unwrap(), 0, "{reduction:?}, {rows}x{cols}");
        }
    }
}

/// More groups than any device has room for: right, or a typed error, and the next call works.
#[test]
fn groups_without_end_are_right_or_out_of_memory() {
    let Some(gpu) = Gpu::open() else { return };
    let any_order = Arithmetic { depth_rows: |rows| rows.saturating_sub(1), ..gpu.arithmetic() };
    let case = Case::new(300, 1024, &any_order);
    match case.wrong(&gpu, GradReduction::Locks { groups: u32::MAX }, &any_order) {
        Ok(wrong) => assert_eq!(wrong, 0),
        Err(Error::Device { source, .. }) => {
            assert!(source.downcast_ref().is_some_and(DriverFailure::is_out_of_memory), "{source}");
        }
        Err(error) => panic!("{error}"),
    }
    assert_eq!(case.wrong(&gpu, GradReduction::Locks { groups: 16 }, &any_order).unwrap(), 0);
}
