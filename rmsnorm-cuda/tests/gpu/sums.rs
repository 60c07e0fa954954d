//! Gradients of weight and bias as f32 sums: stored and accumulated without rounding to the
//! weight's dtype.

use rmsnorm_conformance::Harness;
use rmsnorm_conformance::testing::values;
use rmsnorm_cuda::cudarc::driver::CudaSlice;
use rmsnorm_cuda::{
    Backward, CudaBackend,
    spec::{Error, GradReduction, NormSpec, bf16},
};

use crate::graphs::{capture, stream_without_events};
use crate::support::Gpu;

/// A shape for each kind of program: split, several rows per block, a cluster per row, streaming;
/// and no rows.
const SHAPES: [(usize, usize); 6] = [(64, 1000), (300, 33), (3000, 384), (150, 40000), (40, 300_000), (0, 100)];

/// The tensors of a backward call of layer norm, except its gradients.
struct Data {
    norm: NormSpec,
    x: CudaSlice<bf16>,
    dy: CudaSlice<bf16>,
    weight: CudaSlice<bf16>,
    mean: CudaSlice<f32>,
    rstd: CudaSlice<f32>,
    dx: CudaSlice<bf16>,
}

impl Data {
    fn new(backend: &CudaBackend, (rows, cols): (usize, usize)) -> Self {
        let [x, dy] = [1, 2].map(|seed| values::<bf16>(seed, rows * cols));
        Data::of(backend, (rows, cols), [&x, &dy], &values(4, rows), 0.75)
    }

    /// Whole numbers so small that their sums are exact in any order.
    fn of_whole_numbers(backend: &CudaBackend, (rows, cols): (usize, usize)) -> Self {
        let whole = |factor: usize| -> Vec<bf16> {
            (0..rows * cols).map(|at| bf16::from_f32((at * factor / 8 % 9) as f32 - 4.0)).collect()
        };
        Data::of(backend, (rows, cols), [&whole(5), &whole(11)], &vec![0.0; rows], 1.0)
    }

    fn of(backend: &CudaBackend, (rows, cols): (usize, usize), [x, dy]: [&[bf16]; 2], mean: &[f32], rstd: f32) -> Self {
        let stream = backend.stream();
        // A call may have no elements, but an allocation must have some.
        let padded = |values: &[bf16]| stream.clone_htod(&[values, &[bf16::NAN]].concat()).unwrap();
        let padded_f32 = |values: &[f32]| stream.clone_htod(&[values, &[f32::NAN]].concat()).unwrap();
        Data {
            norm: NormSpec::layer(rows, cols, 1e-5),
            x: padded(x),
            dy: padded(dy),
            weight: stream.clone_htod(&values::<bf16>(3, cols)).unwrap(),
            mean: padded_f32(mean),
            rstd: padded_f32(&vec![rstd; rows]),
            dx: padded(&vec![bf16::NAN; x.len()]),
        }
    }

    /// The call, with the gradients that `with` adds.
    fn call<'a>(
        &'a mut self,
        backend: &CudaBackend,
        with: impl FnOnce(Backward<'a, bf16>) -> Backward<'a, bf16>,
    ) -> Result<(), Error> {
        let (len, rows) = (self.norm.rows * self.norm.cols, self.norm.rows);
        let (dy, x, dx) = (self.dy.slice(..len), self.x.slice(..len), self.dx.slice_mut(..len));
        let args = Backward::new(dy, x, self.rstd.slice(..rows), dx);
        backend.backward(&self.norm, with(args.weight(self.weight.as_view()).mean(self.mean.slice(..rows))))
    }

    /// dweight and dbias, rounded to bf16.
    fn rounded(&mut self, backend: &CudaBackend) -> [Vec<bf16>; 2] {
        let cols = self.norm.cols;
        let [mut dweight, mut dbias] = [0; 2].map(|_| backend.stream().clone_htod(&vec![bf16::NAN; cols]).unwrap());
        self.call(backend, |args| args.dweight(dweight.as_view_mut()).dbias(dbias.as_view_mut())).unwrap();
        [dweight, dbias].map(|gradient| backend.download(&gradient).unwrap())
    }

    /// dweight and dbias as f32 sums.
    fn sums(&mut self, backend: &CudaBackend) -> [Vec<f32>; 2] {
        let [mut dweight, mut dbias] =
            [0; 2].map(|_| backend.stream().clone_htod(&vec![f32::NAN; self.norm.cols]).unwrap());
        self.call(backend, |args| args.dweight_sum(dweight.as_view_mut()).dbias_sum(dbias.as_view_mut())).unwrap();
        [dweight, dbias].map(|gradient| backend.download(&gradient).unwrap())
    }

    /// The values that a call adds to. Zeros have both signs.
    fn held(&self) -> [Vec<f32>; 2] {
        [5, 6].map(|seed| {
            let mut held = values::<f32>(seed, self.norm.cols);
            held[0] = -0.0;
            held
        })
    }
}

/// Compares bits, signs of zero included.
fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn added(held: &[f32], sums: &[f32]) -> Vec<f32> {
    held.iter().zip(sums).map(|(held, sum)| held + sum).collect()
}

/// The backend, and the same backend with partial sums in small calls too.
fn backends(gpu: &Gpu) -> [CudaBackend; 2] {
    [(**gpu).clone(), gpu.with_large_plans()]
}

#[test]
fn sums_are_what_is_rounded_elsewhere() {
    let Some(gpu) = Gpu::open() else { return };
    for (backend, shape) in backends(&gpu).iter().flat_map(|backend| SHAPES.map(|shape| (backend, shape))) {
        let mut data = Data::new(backend, shape);
        let (sums, rounded) = (data.sums(backend), data.rounded(backend));
        for (name, (sums, rounded)) in ["dweight", "dbias"].into_iter().zip(sums.iter().zip(&rounded)) {
            let expected: Vec<u16> = rounded.iter().map(|gradient| gradient.to_bits()).collect();
            let got: Vec<u16> = sums.iter().map(|&sum| bf16::from_f32(sum).to_bits()).collect();
            assert!(got == expected, "{name} of {shape:?}");
            let is_exact = sums.iter().all(|&sum| bf16::from_f32(sum).to_f32() == sum);
            assert_eq!(is_exact, shape.0 == 0, "{name} of {shape:?}: no sum of rows is a bf16");
        }
    }
}

#[test]
fn accumulated_sums_are_added_to_what_is_there() {
    let Some(gpu) = Gpu::open() else { return };
    for (backend, shape) in backends(&gpu).iter().flat_map(|backend| SHAPES.map(|shape| (backend, shape))) {
        let mut data = Data::new(backend, shape);
        let (sums, held) = (data.sums(backend), data.held());
        let [mut dweight, mut dbias] = held.each_ref().map(|held| backend.stream().clone_htod(held).unwrap());
        data.call(backend, |args| args.dweight_sum(dweight.as_view_mut()).dbias_sum(dbias.as_view_mut()).accumulate())
            .unwrap();
        for (name, got, (held, sums)) in
            [("dweight", dweight, (&held[0], &sums[0])), ("dbias", dbias, (&held[1], &sums[1]))]
        {
            let got = backend.download(&got).unwrap();
            assert!(bits(&got) == bits(&added(held, sums)), "{name} of {shape:?}");
        }
    }
}

/// Sums of whole numbers do not depend on the order.
#[test]
fn every_way_of_summing_adds_once() {
    let Some(gpu) = Gpu::open() else { return };
    let locks = [1, 7, 64].map(|groups| GradReduction::Locks { groups });
    let reductions = || locks.into_iter().chain([GradReduction::Atomics, GradReduction::Partials]);
    for (backend, shape) in backends(&gpu).iter().flat_map(|backend| SHAPES.map(|shape| (backend, shape))) {
        let mut data = Data::of_whole_numbers(backend, shape);
        let ([sums, _], [held, _]) = (data.sums(backend), data.held());
        for grad_reduction in reductions() {
            let mut stored = backend.stream().clone_htod(&vec![f32::NAN; data.norm.cols]).unwrap();
            data.call(backend, |args| args.dweight_sum(stored.as_view_mut()).grad_reduction(grad_reduction)).unwrap();
            assert!(bits(&backend.download(&stored).unwrap()) == bits(&sums), "{shape:?}, {grad_reduction:?}");
            let mut dweight = backend.stream().clone_htod(&held).unwrap();
            data.call(backend, |args| {
                args.dweight_sum(dweight.as_view_mut()).accumulate().grad_reduction(grad_reduction)
            })
            .unwrap();
            let got = backend.download(&dweight).unwrap();
            assert!(bits(&got) == bits(&added(&held, &sums)), "{shape:?}, {grad_reduction:?}");
        }
    }
}

#[test]
fn a_graph_adds_whenever_it_is_replayed() {
    let Some(gpu) = Gpu::open() else { return };
    let backend = gpu.on(stream_without_events(&gpu)).unwrap();
    for backend in [backend.clone(), backend.with_large_plans()] {
        for shape in SHAPES.into_iter().filter(|(rows, _)| *rows > 0) {
            let mut data = Data::new(&backend, shape);
            let (sums, held) = (data.sums(&backend), data.held());
            let [mut dweight, mut dbias] = held.each_ref().map(|held| backend.stream().clone_htod(held).unwrap());
            let mut call = || {
                data.call(&backend, |args| {
                    args.dweight_sum(dweight.as_view_mut()).dbias_sum(dbias.as_view_mut()).accumulate()
                })
            };
            // Compiles the kernels that the capture needs.
            call().unwrap();
            let (outcome, graph) = capture(backend.stream(), call);
            outcome.unwrap();
            let graph = graph.unwrap().unwrap();
            let mut expected = held;
            for replay in 0..4 {
                expected.iter_mut().zip(&sums).for_each(|(expected, sums)| *expected = added(expected, sums));
                for (got, expected) in [&dweight, &dbias].into_iter().zip(&expected) {
                    let got = backend.download(got).unwrap();
                    assert!(bits(&got) == bits(expected), "{shape:?}, {replay} replays");
                }
                graph.launch().unwrap();
            }
        }
    }
}
