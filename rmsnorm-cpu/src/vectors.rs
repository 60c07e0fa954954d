//! Results in new vectors, which are written once and not zeroed first.

use std::mem::MaybeUninit;

use rmsnorm_spec::{
    Access, Backward, Direction, Element, Error, Forward, NormSpec, ResidualPlacement, Rows, Tensor, TensorSet,
    TensorShape,
};

use crate::memory::no_room;
use crate::{CpuBackend, UninitBackend};

/// Inputs of [`CpuBackend::forward_vec`]. Shapes are as in [`Forward`]; matrices are slices of
/// dense rows, [`Rows::strided`] or [`Rows::grouped`].
#[derive(Clone, Copy, Debug)]
pub struct ForwardInputs<'a, T: Element, W: Element = T, R: Element = T> {
    x: X<'a, T, R>,
    weight: Option<&'a [W]>,
    bias: Option<&'a [W]>,
    residual: Option<Rows<&'a [R]>>,
    next_weight: Option<&'a [W]>,
    next_bias: Option<&'a [W]>,
    gate: Option<Rows<&'a [T]>>,
}

/// The input of a norm.
#[derive(Clone, Copy, Debug)]
enum X<'a, T, R> {
    LikeY(Rows<&'a [T]>),
    /// Of another dtype than `y`.
    Cast(Rows<&'a [R]>),
}

impl<'a, T: Element> ForwardInputs<'a, T> {
    /// `x` (rows, cols), if all tensors have one dtype.
    pub fn new(x: impl Into<Rows<&'a [T]>>) -> Self {
        ForwardInputs::mixed(x)
    }
}

impl<'a, T: Element, W: Element, R: Element> ForwardInputs<'a, T, W, R> {
    /// As [`new`](ForwardInputs::new), with separate dtypes for weight and bias (`W`) and the
    /// residual stream (`R`): each the activations' dtype or f32.
    pub fn mixed(x: impl Into<Rows<&'a [T]>>) -> Self {
        ForwardInputs::of(X::LikeY(x.into()))
    }

    /// `x` of another dtype (`R`) than `y` (`T`), as [`Forward::cast`].
    pub fn cast(x: impl Into<Rows<&'a [R]>>) -> Self {
        ForwardInputs::of(X::Cast(x.into()))
    }

    fn of(x: X<'a, T, R>) -> Self {
        let (weight, bias, residual, next_weight, next_bias) = (None, None, None, None, None);
        ForwardInputs { x, weight, bias, residual, next_weight, next_bias, gate: None }
    }

    /// With this weight (cols).
    pub fn weight(self, weight: &'a [W]) -> Self {
        ForwardInputs { weight: Some(weight), ..self }
    }

    /// With this bias (cols).
    pub fn bias(self, bias: &'a [W]) -> Self {
        ForwardInputs { bias: Some(bias), ..self }
    }

    /// With this residual. It is added to `x` before the norm, or to the norm with
    /// [`NormSpec::residual_after`].
    pub fn residual(self, residual: impl Into<Rows<&'a [R]>>) -> Self {
        ForwardInputs { residual: Some(residual.into()), ..self }
    }

    /// With this weight of the next norm, which normalizes the sum after the norm.
    pub fn next_weight(self, next_weight: &'a [W]) -> Self {
        ForwardInputs { next_weight: Some(next_weight), ..self }
    }

    /// With this bias (cols) of the next norm.
    pub fn next_bias(self, next_bias: &'a [W]) -> Self {
        ForwardInputs { next_bias: Some(next_bias), ..self }
    }

    /// With this gate (rows, cols), for a [`NormSpec`] with one.
    pub fn gate(self, gate: impl Into<Rows<&'a [T]>>) -> Self {
        ForwardInputs { gate: Some(gate.into()), ..self }
    }
}

/// Outputs of [`CpuBackend::forward_vec`], as dense rows. Outputs that were not wanted are empty.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct ForwardOutputs<T, R = T> {
    /// The normalized rows (rows, cols).
    pub y: Vec<T>,
    /// The rounded sum of `x` and `residual`, which backward takes as its `x`; or, with
    /// [`NormSpec::residual_after`], of the norm and `residual`.
    pub residual_out: Vec<R>,
    /// The mean of every row (rows).
    pub mean: Vec<f32>,
    /// `1 / sqrt(var + eps)` of every row (rows).
    pub rstd: Vec<f32>,
    /// The mean of every row of `residual_out`, for the next norm.
    pub next_mean: Vec<f32>,
    /// `1 / sqrt(var + eps)` of every row of `residual_out`, for the next norm.
    pub next_rstd: Vec<f32>,
}

/// Inputs of [`CpuBackend::backward_vec`]. Shapes are as in [`Backward`]; matrices are slices of
/// dense rows, [`Rows::strided`] or [`Rows::grouped`].
#[derive(Clone, Copy, Debug)]
pub struct BackwardInputs<'a, T: Element, W: Element = T, R: Element = T> {
    dy: Rows<&'a [T]>,
    x: Rows<&'a [R]>,
    weight: Option<&'a [W]>,
    mean: Option<&'a [f32]>,
    rstd: &'a [f32],
    dresidual_out: Option<Rows<&'a [R]>>,
    bias: Option<&'a [W]>,
    gate: Option<Rows<&'a [T]>>,
    is_cast: bool,
}

impl<'a, T: Element> BackwardInputs<'a, T> {
    /// `dy`, the norm's input `x` and its saved `rstd`, if all tensors have one dtype. Layer norm
    /// also needs [`mean`](Self::mean).
    pub fn new(dy: impl Into<Rows<&'a [T]>>, x: impl Into<Rows<&'a [T]>>, rstd: &'a [f32]) -> Self {
        BackwardInputs::mixed(dy, x, rstd)
    }
}

impl<'a, T: Element, W: Element, R: Element> BackwardInputs<'a, T, W, R> {
    /// As [`new`](BackwardInputs::new), with separate dtypes for the weight (`W`) and the residual
    /// stream (`R`: `x` and `dresidual_out`): each the activations' dtype or f32.
    pub fn mixed(dy: impl Into<Rows<&'a [T]>>, x: impl Into<Rows<&'a [R]>>, rstd: &'a [f32]) -> Self {
        let (dy, x, weight, mean, dresidual_out) = (dy.into(), x.into(), None, None, None);
        BackwardInputs { dy, x, weight, mean, rstd, dresidual_out, bias: None, gate: None, is_cast: false }
    }

    /// As [`mixed`](BackwardInputs::mixed), with the gradient of `x` in the dtype of `x` alone, as
    /// [`Backward::cast`]: the call returns `dresidual` and no `dx`.
    pub fn cast(dy: impl Into<Rows<&'a [T]>>, x: impl Into<Rows<&'a [R]>>, rstd: &'a [f32]) -> Self {
        BackwardInputs { is_cast: true, ..BackwardInputs::mixed(dy, x, rstd) }
    }

    /// With the forward pass's weight (cols).
    pub fn weight(self, weight: &'a [W]) -> Self {
        BackwardInputs { weight: Some(weight), ..self }
    }

    /// With the forward pass's bias (cols), which a gate after the norm needs.
    pub fn bias(self, bias: &'a [W]) -> Self {
        BackwardInputs { bias: Some(bias), ..self }
    }

    /// With the forward pass's gate (rows, cols).
    pub fn gate(self, gate: impl Into<Rows<&'a [T]>>) -> Self {
        BackwardInputs { gate: Some(gate.into()), ..self }
    }

    /// With the forward pass's mean (rows, groups).
    pub fn mean(self, mean: &'a [f32]) -> Self {
        BackwardInputs { mean: Some(mean), ..self }
    }

    /// With the gradient of `residual_out` from later layers.
    pub fn dresidual_out(self, dresidual_out: impl Into<Rows<&'a [R]>>) -> Self {
        BackwardInputs { dresidual_out: Some(dresidual_out.into()), ..self }
    }
}

/// Outputs of [`CpuBackend::backward_vec`], as dense rows. Outputs that were not wanted are empty.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct BackwardOutputs<T, W = T, R = T> {
    /// The gradient of `x` and of `residual` (rows, cols).
    pub dx: Vec<T>,
    /// `dx` in the residual stream's dtype. Alone with [`BackwardInputs::cast`].
    pub dresidual: Vec<R>,
    /// The gradient of `weight` (cols).
    pub dweight: Vec<W>,
    /// The gradient of `bias` (cols).
    pub dbias: Vec<W>,
    /// The gradient of `gate` (rows, cols).
    pub dgate: Vec<T>,
}

impl CpuBackend {
    /// As [`forward`](Self::forward), with results in new vectors: `y`, and those of
    /// `residual_out`, `mean` and `rstd` that `wanted` lists. In newly mapped memory this takes a
    /// third of the time of zeroed vectors.
    ///
    /// With [`NormSpec::residual_after`], `residual_out` is always returned, and the others,
    /// including `y`, only if wanted.
    ///
    /// # Errors
    /// As `forward`; `InvalidArgument` if `wanted` has a tensor that is not an output; `Device` if
    /// memory cannot be allocated.
    ///
    /// # Example
    /// ```
    /// use rmsnorm_cpu::{BackwardInputs, CpuBackend, ForwardInputs, spec::{Error, NormSpec, Tensor}};
    /// # fn main() -> Result<(), Error> {
    /// let (backend, norm) = (CpuBackend::new(), NormSpec::rms(2, 2, 0.0));
    /// let (x, weight) = ([3.0f32, 3.0, -5.0, 5.0], [1.0, 2.0]);
    /// let made = backend.forward_vec(&norm, ForwardInputs::new(&x).weight(&weight), &[Tensor::Rstd])?;
    /// assert_eq!(made.y, [1.0, 2.0, -1.0, 2.0]);
    ///
    /// let inputs = BackwardInputs::new(&[1.0, 1.0, 0.0, 0.0], &x, &made.rstd).weight(&weight);
    /// let gradients = backend.backward_vec(&norm, inputs, &[Tensor::Dweight])?;
    /// assert_eq!(gradients.dweight, [1.0, 1.0]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn forward_vec<T: Element, W: Element, R: Element>(
        &self,
        spec: &NormSpec,
        inputs: ForwardInputs<'_, T, W, R>,
        wanted: impl Into<TensorSet>,
    ) -> Result<ForwardOutputs<T, R>, Error> {
        let always = match spec.residual_placement {
            ResidualPlacement::Before => Tensor::Y,
            ResidualPlacement::After => Tensor::ResidualOut,
        };
        let wanted = outputs(Direction::Forward, wanted.into(), always)?;
        let mut y = Output::new(spec, wanted, Tensor::Y)?;
        let mut residual_out = Output::new(spec, wanted, Tensor::ResidualOut)?;
        let mut mean = Output::new(spec, wanted, Tensor::Mean)?;
        let mut rstd = Output::new(spec, wanted, Tensor::Rstd)?;
        let mut next_mean = Output::new(spec, wanted, Tensor::NextMean)?;
        let mut next_rstd = Output::new(spec, wanted, Tensor::NextRstd)?;
        let mut args = match (inputs.x, y.wanted()) {
            (X::LikeY(x), Some(y)) => Forward::<UninitBackend, T>::new(x, y).weight_dtype::<W>().residual_dtype::<R>(),
            (X::LikeY(x), None) => {
                Forward::<UninitBackend, T>::added_to_residual(x).weight_dtype::<W>().residual_dtype::<R>()
            }
            (X::Cast(x), y) => Forward::<UninitBackend, T, T, R>::cast(x, y.unwrap_or_default()).weight_dtype::<W>(),
        };
        if let Some(residual) = inputs.residual {
            args = args.residual(residual);
        }
        args.weight = inputs.weight;
        args.bias = inputs.bias;
        args.residual_out = residual_out.wanted().map(Rows::dense);
        args.mean = mean.wanted();
        args.rstd = rstd.wanted();
        args.next_weight = inputs.next_weight;
        args.next_bias = inputs.next_bias;
        args.next_mean = next_mean.wanted();
        args.next_rstd = next_rstd.wanted();
        args.gate = inputs.gate;
        self.uninit().forward(spec, args)?;
        // SAFETY:
        // - contents: the call has succeeded, so it has written every element of every output that it was given, and those
        //   that are wanted were given.
        unsafe {
            Ok(ForwardOutputs {
                y: y.written(),
                residual_out: residual_out.written(),
                mean: mean.written(),
                rstd: rstd.written(),
                next_mean: next_mean.written(),
                next_rstd: next_rstd.written(),
            })
        }
    }

    /// As [`backward`](Self::backward), with results in new vectors: `dx`, or `dresidual` with
    /// [`BackwardInputs::cast`], and those of `dresidual`, `dweight`, `dbias` and `dgate` that
    /// `wanted` lists. [`forward_vec`](Self::forward_vec) has an example.
    ///
    /// # Errors
    /// As [`forward_vec`](Self::forward_vec).
    pub fn backward_vec<T: Element, W: Element, R: Element>(
        &self,
        spec: &NormSpec,
        inputs: BackwardInputs<'_, T, W, R>,
        wanted: impl Into<TensorSet>,
    ) -> Result<BackwardOutputs<T, W, R>, Error> {
        let BackwardInputs { dy, x, rstd, is_cast, .. } = inputs;
        let wanted = wanted.into();
        if is_cast && wanted.has(Tensor::Dx) {
            let rule = "BackwardInputs::cast has dresidual and no dx".into();
            return Err(Error::InvalidArgument { arg: "wanted", rule });
        }
        let always = if is_cast { Tensor::Dresidual } else { Tensor::Dx };
        let wanted = outputs(Direction::Backward, wanted, always)?;
        let mut dx = Output::new(spec, wanted, Tensor::Dx)?;
        let mut dresidual = Output::new(spec, wanted, Tensor::Dresidual)?;
        let mut dweight = Output::new(spec, wanted, Tensor::Dweight)?;
        let mut dbias = Output::new(spec, wanted, Tensor::Dbias)?;
        let mut dgate = Output::new(spec, wanted, Tensor::Dgate)?;
        let mut args = Backward::<UninitBackend, T, W, R>::mixed(dy, x, rstd, Rows::dense(dx.elements()));
        if is_cast {
            args.dx = None;
        }
        args.weight = inputs.weight;
        args.mean = inputs.mean;
        args.dresidual_out = inputs.dresidual_out;
        args.dresidual = dresidual.wanted().map(Rows::dense);
        args.dweight = dweight.wanted();
        args.dbias = dbias.wanted();
        args.bias = inputs.bias;
        args.gate = inputs.gate;
        args.dgate = dgate.wanted().map(Rows::dense);
        self.uninit().backward(spec, args)?;
        // SAFETY:
        // - contents: the call has succeeded, so it has written every element of every output that it was given, and those
        //   that are wanted were given.
        unsafe {
            Ok(BackwardOutputs {
                dx: dx.written(),
                dresidual: dresidual.written(),
                dweight: dweight.written(),
                dbias: dbias.written(),
                dgate: dgate.written(),
            })
        }
    }
}

/// The outputs to make: `wanted`, and `always`.
fn outputs(direction: Direction, wanted: TensorSet, always: Tensor) -> Result<TensorSet, Error> {
    let is_output = |tensor: Tensor| tensor.access(direction) == Some(Access::Write) && tensor != Tensor::Workspace;
    match wanted.iter().find(|&tensor| !is_output(tensor)) {
        Some(tensor) => {
            let rule = format!("{tensor} is not an output of a {} call", direction.name());
            Err(Error::InvalidArgument { arg: "wanted", rule })
        }
        None => Ok(wanted.with(always)),
    }
}

/// An output that becomes a vector.
struct Output<E> {
    /// Empty, with room for `len`.
    vector: Vec<E>,
    len: usize,
    is_wanted: bool,
}

impl<E: Element> Output<E> {
    /// Room for a tensor, if it is wanted.
    fn new(spec: &NormSpec, wanted: TensorSet, tensor: Tensor) -> Result<Self, Error> {
        let NormSpec { rows, cols, groups, .. } = *spec;
        let is_wanted = wanted.has(tensor);
        let len = match tensor.shape() {
            _ if !is_wanted => 0,
            TensorShape::Cols => cols,
            // Beyond usize, the call refuses groups that do not divide the columns.
            TensorShape::Rows => rows.saturating_mul(groups.min(cols)),
            TensorShape::One => 1,
            // Scales are never wanted here.
            TensorShape::Matrix
            | TensorShape::Transposed
            | TensorShape::Workspace
            | TensorShape::Scales
            | TensorShape::ScalesColumnwise => {
                let too_large = Error::TooLarge { arg: tensor.name(), rows, row_stride: cols, storage: E::STORAGE };
                rows.checked_mul(cols).ok_or(too_large)?
            }
        };
        let mut vector = Vec::new();
        vector.try_reserve_exact(len).map_err(|error| no_room::<E>(tensor.name(), len, &error))?;
        Ok(Output { vector, len, is_wanted })
    }

    fn elements(&mut self) -> &mut [MaybeUninit<E>] {
        &mut self.vector.spare_capacity_mut()[..self.len]
    }

    fn wanted(&mut self) -> Option<&mut [MaybeUninit<E>]> {
        self.is_wanted.then(|| self.elements())
    }

    /// The vector with its elements.
    ///
    /// # Safety
    /// All [`elements`](Self::elements) were written, if it is wanted.
    unsafe fn written(mut self) -> Vec<E> {
        // SAFETY:
        // - length: `new` has reserved that many elements;
        // - contents: the caller's obligation; there are none where it is not wanted.
        unsafe { self.vector.set_len(self.len) };
        self.vector
    }
}
