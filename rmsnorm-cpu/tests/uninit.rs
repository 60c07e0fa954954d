//! Outputs in uninitialized memory: the conformance suite on [`UninitBackend`]. The suite poisons
//! outputs in two ways, which exposes elements that are read before they are written, or never
//! written. Also tests results in new vectors.

use std::mem::MaybeUninit;
use std::ops::Range;

use rmsnorm_conformance::testing::values;
use rmsnorm_conformance::{Arithmetic, Harness};
use rmsnorm_cpu::{Backward, BackwardInputs, CpuBackend, Forward, ForwardInputs, ForwardOutputs, Isa, UninitBackend};
use rmsnorm_spec::{AnyElement, DType, Error, NormSpec, Problem, Rows, Tensor, TensorSet, bf16};

/// The suite's access to both backends; everything except output views is [`CpuBackend`]'s.
struct Uninit {
    values: CpuBackend,
    backend: UninitBackend,
}

impl Uninit {
    fn open() -> Result<Self, Error> {
        let values = CpuBackend::with_isa_and_threads(Isa::detect(), 2)?;
        let backend = values.uninit();
        Ok(Uninit { values, backend })
    }
}

impl Harness for Uninit {
    type Backend = UninitBackend;
    type Buffer<T: AnyElement> = <CpuBackend as Harness>::Buffer<T>;

    fn backend(&self) -> &UninitBackend {
        &self.backend
    }

    fn arithmetic(&self) -> Arithmetic {
        self.values.arithmetic()
    }

    fn device(&self) -> String {
        self.values.device()
    }

    fn cols_breakpoints(&self) -> Vec<usize> {
        self.values.cols_breakpoints()
    }

    fn rows_breakpoints(&self) -> Vec<usize> {
        self.values.rows_breakpoints()
    }

    fn shape_breakpoints(&self, dtype: DType) -> Vec<(usize, usize)> {
        self.values.shape_breakpoints(dtype)
    }

    fn upload<T: AnyElement>(&self, data: &[T]) -> Result<Self::Buffer<T>, Error> {
        self.values.upload(data)
    }

    fn download<T: AnyElement>(&self, buffer: &Self::Buffer<T>) -> Result<Vec<T>, Error> {
        self.values.download(buffer)
    }

    fn view<'a, T: AnyElement>(&self, buffer: &'a Self::Buffer<T>, range: Range<usize>) -> &'a [T] {
        self.values.view(buffer, range)
    }

    fn view_mut<'a, T: AnyElement>(
        &self,
        buffer: &'a mut Self::Buffer<T>,
        range: Range<usize>,
    ) -> &'a mut [MaybeUninit<T>] {
        let view = self.values.view_mut(buffer, range);
        // SAFETY:
        // - memory: the same elements, borrowed as before; `MaybeUninit<T>` has the layout of `T`;
        // - contents: a call writes values only.
        unsafe { &mut *(std::ptr::from_mut(view) as *mut [MaybeUninit<T>]) }
    }
}

#[test]
fn calls_without_values_in_their_outputs_are_conformant() {
    use rmsnorm_conformance::spec::Norm;
    use rmsnorm_conformance::{
        Kind, test_bounds, test_determinism, test_metamorphic, test_misuse, test_norm, test_spans,
    };
    test_spans(Uninit::open()).unwrap();
    test_misuse(Uninit::open()).unwrap();
    for norm in Norm::ALL {
        test_determinism(Uninit::open(), norm).unwrap();
        test_metamorphic(Uninit::open(), norm).unwrap();
    }
    for norm in Norm::ALL.into_iter().filter(|norm| !Norm::USUAL.contains(norm)) {
        test_norm(Uninit::open(), norm).unwrap();
    }
    for norm in Norm::USUAL {
        for kind in [Kind::FORWARD, Kind::BACKWARD, Kind::END_TO_END, Kind::FORWARD_AFTER] {
            DType::ALL.into_iter().for_each(|dtype| test_bounds(Uninit::open(), kind, norm, dtype).unwrap());
        }
    }
}

/// Three optional outputs of forward, then three of backward.
const OPTIONAL: [Tensor; 6] =
    [Tensor::ResidualOut, Tensor::Mean, Tensor::Rstd, Tensor::Dweight, Tensor::Dbias, Tensor::Dresidual];

/// Every subset of the optional outputs: sizes, and the bits of a call on slices.
#[test]
fn vectors_have_the_bits_of_slices_and_only_what_was_wanted() {
    let backend = CpuBackend::with_isa_and_threads(Isa::detect(), 2).unwrap();
    // The last shape is split over threads and bypasses the cache.
    for (rows, cols) in [(0, 5), (1, 1), (3, 33), (20, 100), (2100, 1021)] {
        let spec = NormSpec::layer(rows, cols, 1e-5).weight_offset(0.5);
        let (x, dy) = (values::<bf16>(1, rows * 2 * cols), values::<bf16>(2, rows * cols));
        let x = Rows::strided(&x[..(rows * 2 * cols).saturating_sub(cols)], 2 * cols);
        let (residual, weight) = (values::<f32>(3, rows * cols), values::<f32>(4, cols));
        let (mut y, mut sum) = (vec![bf16::NAN; rows * cols], vec![f32::NAN; rows * cols]);
        let (mut mean, mut rstd) = (vec![f32::NAN; rows], vec![f32::NAN; rows]);
        let forward = Forward::new(x, &mut y).f32_weight().f32_residual().weight(&weight).bias(&weight);
        let forward = forward.residual(&residual).residual_out(&mut sum).mean(&mut mean).rstd(&mut rstd);
        backend.forward(&spec, forward).unwrap();
        let (mut dx, mut dweight, mut dbias) =
            (vec![bf16::NAN; rows * cols], vec![f32::NAN; cols], vec![f32::NAN; cols]);
        let backward = Backward::<_, f32, f32>::mixed(&dy, &sum, &rstd, &mut dx).weight(&weight).mean(&mean);
        let mut dresidual = vec![f32::NAN; rows * cols];
        let backward = backward.dresidual_out(&residual).dweight(&mut dweight).dbias(&mut dbias);
        let backward = backward.dresidual(&mut dresidual);
        backend.backward(&spec, backward).unwrap();

        for bits in 0..1 << OPTIONAL.len() {
            let is_wanted = |(bit, _): &(usize, Tensor)| bits >> bit & 1 == 1;
            let wanted: TensorSet =
                OPTIONAL.into_iter().enumerate().filter(is_wanted).map(|(_, tensor)| tensor).collect();
            let [forward, backward] =
                [&OPTIONAL[..3], &OPTIONAL[3..]].map(|all| wanted.intersection(TensorSet::of(all)));
            let inputs = ForwardInputs::mixed(x).weight(&weight).bias(&weight).residual(&residual);
            let made = backend.forward_vec(&spec, inputs, forward).unwrap();
            let of = |tensor, all: &[f32]| if wanted.has(tensor) { all.to_vec() } else { Vec::new() };
            assert_eq!(made.y, y, "{wanted:?}");
            assert_eq!(made.residual_out, of(Tensor::ResidualOut, &sum), "{wanted:?}");
            assert_eq!((made.mean, made.rstd), (of(Tensor::Mean, &mean), of(Tensor::Rstd, &rstd)), "{wanted:?}");

            let inputs = BackwardInputs::mixed(&dy, &sum, &rstd).weight(&weight).mean(&mean).dresidual_out(&residual);
            let made = backend.backward_vec(&spec, inputs, backward).unwrap();
            assert_eq!(made.dx, dx, "{wanted:?}");
            let gradients = (of(Tensor::Dweight, &dweight), of(Tensor::Dbias, &dbias));
            assert_eq!((made.dweight, made.dbias), gradients, "{wanted:?}");
            assert_eq!(made.dresidual, of(Tensor::Dresidual, &dresidual), "{wanted:?}");
        }
    }
}

#[test]
fn vectors_of_another_dtype_have_the_bits_of_slices() {
    let (backend, rows, cols) = (CpuBackend::new(), 20, 100);
    let spec = NormSpec::rms(rows, cols, 1e-5);
    let (x, weight, dy) = (values::<bf16>(1, rows * cols), values::<f32>(2, cols), values::<f32>(3, rows * cols));
    let (mut y, mut rstd) = (vec![f32::NAN; rows * cols], vec![f32::NAN; rows]);
    let args = Forward::<f32, f32, bf16>::cast(&x, &mut y).weight(&weight).rstd(&mut rstd);
    backend.forward(&spec, args).unwrap();
    let (mut dx, mut dweight) = (vec![bf16::NAN; rows * cols], vec![f32::NAN; cols]);
    let args = Backward::<f32, f32, bf16>::cast(&dy, &x, &rstd, &mut dx).weight(&weight);
    backend.backward(&spec, args.dweight(&mut dweight)).unwrap();

    let inputs = ForwardInputs::<f32, f32, bf16>::cast(&x).weight(&weight);
    let made = backend.forward_vec(&spec, inputs, &[Tensor::Rstd]).unwrap();
    assert_eq!((made.y, made.rstd), (y, rstd.clone()));
    let residual = backend.forward_vec(&spec, inputs.residual(&x), &[]).unwrap_err().to_string();
    assert!(residual.starts_with("residual must not be given: Forward::cast adds none"), "{residual}");
    let inputs = BackwardInputs::<f32, f32, bf16>::cast(&dy, &x, &rstd).weight(&weight);
    let made = backend.backward_vec(&spec, inputs, &[Tensor::Dweight]).unwrap();
    assert_eq!((made.dx, made.dresidual, made.dweight), (vec![], dx, dweight));
    let error = backend.backward_vec(&spec, inputs, &[Tensor::Dx]).unwrap_err();
    assert_eq!(error.to_string(), "wanted: BackwardInputs::cast has dresidual and no dx");
}

#[test]
fn gradients_of_no_rows_are_zeros() {
    let norm = NormSpec::rms(0, 40, 1e-5);
    let inputs = BackwardInputs::<f32>::new(&[], &[], &[]);
    let made = CpuBackend::new().backward_vec(&norm, inputs, &[Tensor::Dweight, Tensor::Dbias]).unwrap();
    assert_eq!((made.dx, made.dweight, made.dbias), (vec![], vec![0.0; 40], vec![0.0; 40]));
}

#[test]
fn vectors_that_cannot_be_made_are_errors() {
    let (backend, x) = (CpuBackend::new(), [1.0f32; 6]);
    let message = |spec: &NormSpec, inputs: ForwardInputs<'_, f32>, wanted: &[Tensor]| {
        let made: Result<ForwardOutputs<f32>, Error> = backend.forward_vec(spec, inputs, wanted);
        made.unwrap_err().to_string()
    };
    let norm = NormSpec::rms(2, 3, 1e-5);
    let inputs = ForwardInputs::new(&x);
    assert_eq!(message(&norm, inputs, &[Tensor::Dweight]), "wanted: dweight is not an output of a forward call");
    assert_eq!(message(&norm, inputs, &[Tensor::Weight]), "wanted: weight is not an output of a forward call");
    let mean = "mean must not be given: rms norm does not remove the mean";
    assert_eq!(message(&norm, inputs, &[Tensor::Mean]), mean);
    let sum = "residual_out must not be given: there is no residual to add";
    assert_eq!(message(&norm, inputs, &[Tensor::ResidualOut]), sum);
    assert_eq!(message(&norm, ForwardInputs::new(&x[..5]), &[]), "x: expected 6 elements, got 5");
    let large = message(&NormSpec::rms(usize::MAX, 3, 1e-5), inputs, &[]);
    assert!(large.starts_with("y: 18446744073709551615 rows at a stride of 3"), "{large}");
    let large = message(&NormSpec::rms(1 << 60, 3, 1e-5), inputs, &[]);
    assert!(large.starts_with("cpu device error: cannot allocate 13835058055282163712 bytes for the y"), "{large}");
    let dy = BackwardInputs::new(&x, &x, &[1.0; 2]);
    let error = backend.backward_vec(&norm, dy, &[Tensor::Workspace]).unwrap_err();
    assert_eq!(error.to_string(), "wanted: workspace is not an output of a backward call");
}

/// A call that overwrites its input is refused.
#[test]
fn uninit_in_place_is_unsupported_and_writes_nothing() {
    let norm = NormSpec::rms(1, 2, 1e-5);
    let mut x = [MaybeUninit::new(1.5f32), MaybeUninit::new(2.5)];
    let args = rmsnorm_spec::Forward::<UninitBackend, f32>::in_place(&mut x[..]);
    let error = CpuBackend::new().uninit().forward(&norm, args).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    // SAFETY:
    // - contents: made from values.
    assert_eq!(x.map(|element| unsafe { element.assume_init() }), [1.5, 2.5]);
}

/// An uninitialized workspace that is longer than needed.
#[test]
fn uninit_workspace_gives_the_bits_of_one_with_values() {
    let (rows, cols) = (100, 45);
    let norm = NormSpec::rms(rows, cols, 1e-5);
    let (x, dy, rstd) = (values::<f32>(1, rows * cols), values::<f32>(2, rows * cols), vec![1.0; rows]);
    let backend = CpuBackend::new();
    let wanted = [Tensor::Dweight, Tensor::Dbias];
    let expected = backend.backward_vec(&norm, BackwardInputs::new(&dy, &x, &rstd), &wanted).unwrap();
    let len = backend.workspace_len(&Problem::backward(norm.norm, rows, cols, DType::F32, &wanted));
    let mut memory = [rows * cols, cols, cols, len + 7].map(Vec::<f32>::with_capacity);
    let [dx, dweight, dbias, workspace] = memory.each_mut().map(Vec::spare_capacity_mut);
    let args = rmsnorm_spec::Backward::<UninitBackend, f32>::new(&dy, &x, &rstd, &mut dx[..rows * cols]);
    let args = args.dweight(&mut dweight[..cols]).dbias(&mut dbias[..cols]).workspace(workspace);
    backend.uninit().backward(&norm, args).unwrap();
    let [mut dx, mut dweight, mut dbias, _] = memory;
    for (vector, len) in [(&mut dx, rows * cols), (&mut dweight, cols), (&mut dbias, cols)] {
        // SAFETY:
        // - length: within the capacity;
        // - contents: the call has succeeded, so it has written every element of what it was given.
        unsafe { vector.set_len(len) };
    }
    assert_eq!((dx, dweight, dbias), (expected.dx, expected.dweight, expected.dbias));
}
