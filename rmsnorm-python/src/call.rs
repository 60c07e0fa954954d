//! A call on foreign tensors: the norm and its tensors. Dtypes are run-time values on the whole way
//! to a backend.

use rmsnorm_core::quant::{QuantSpec, ScaleType};
use rmsnorm_core::{
    Activation, AnyBackward, AnyCall, AnyForward, AnyIn, AnyOut, AnyQuantizedForward, CastOrder, Checked, DType,
    DTypes, Direction, Error, Norm, NormSpec, Problem, ResidualPlacement, Rows, Scales, Source, Storage, Tensor,
    TensorSet, TensorShape,
};

use crate::device;
use crate::foreign::{Foreign, Place};
use crate::lender::{Lender, Lent};

/// The norm with a gate that has the activation of this name.
///
/// # Errors
/// `InvalidArgument` if no activation has the name.
pub(crate) fn gated(spec: NormSpec, activation: &str, is_before: bool) -> Result<NormSpec, Error> {
    let refuse = || {
        let names = Activation::ALL.map(Activation::name).join(", ");
        Error::InvalidArgument { arg: "activation", rule: format!("expected one of {names}, got {activation:?}") }
    };
    let activation = Activation::from_name(activation).ok_or_else(refuse)?;
    Ok(if is_before { spec.gate_before(activation) } else { spec.gate_after(activation) })
}

/// The norm and the cast order of these names.
///
/// # Errors
/// `InvalidArgument` if there is none.
pub(crate) fn kind(norm: &str, cast_order: &str) -> Result<(Norm, CastOrder), Error> {
    fn refuse<const N: usize>(arg: &'static str, names: [&str; N], got: &str) -> Error {
        Error::InvalidArgument { arg, rule: format!("expected one of {}, got {got:?}", names.join(", ")) }
    }
    let found = Norm::from_name(norm).ok_or_else(|| refuse("norm", Norm::ALL.map(Norm::name), norm))?;
    let order = CastOrder::from_name(cast_order)
        .ok_or_else(|| refuse("cast_order", CastOrder::ALL.map(CastOrder::name), cast_order))?;
    Ok((found, order))
}

/// The storage of tensors whose storage does not depend on the caller's tensors.
pub(crate) const F32: Storage = Storage::Float(DType::F32);

/// A call: everything except its place.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    pub(crate) direction: Direction,
    pub(crate) spec: NormSpec,
    pub(crate) quant: Option<QuantSpec>,
    /// The dtype of `y` and `dy` if `x` has another one. `Residual` then stands for `x`, and `Dresidual`
    /// for `dx`.
    pub(crate) y_dtype: Option<DType>,
    tensors: [Option<Foreign>; Tensor::COUNT],
}

impl Call {
    /// A call without tensors.
    pub(crate) const fn new(direction: Direction, spec: NormSpec) -> Self {
        Call { direction, spec, quant: None, y_dtype: None, tensors: [None; Tensor::COUNT] }
    }

    /// Adds a tensor, by the name of its argument: with a [`y_dtype`](Self::y_dtype), `X` and `Dx` become
    /// what stands for them.
    ///
    /// # Errors
    /// `InvalidArgument` if it is a matrix whose size differs from the call's, or a vector that is
    /// not contiguous.
    pub(crate) fn with(&mut self, tensor: Tensor, foreign: Foreign) -> Result<&mut Self, Error> {
        let foreign = if tensor.is_matrix() { self.matrix(tensor, foreign)? } else { foreign.flat(tensor)? };
        self.tensors[self.tensor_of(tensor) as usize] = Some(foreign);
        Ok(self)
    }

    /// The tensor that an argument is in this call.
    pub(crate) fn tensor_of(&self, arg: Tensor) -> Tensor {
        match (self.y_dtype, self.direction, arg) {
            (Some(_), Direction::Forward, Tensor::X) => Tensor::Residual,
            (Some(_), Direction::Backward, Tensor::Dx) => Tensor::Dresidual,
            (_, _, arg) => arg,
        }
    }

    /// The argument that a tensor is in this call.
    fn arg_of(&self, tensor: Tensor) -> Tensor {
        [Tensor::X, Tensor::Dx]
            .into_iter()
            .find(|&arg| arg != tensor && self.tensor_of(arg) == tensor)
            .unwrap_or(tensor)
    }

    fn matrix(&self, tensor: Tensor, foreign: Foreign) -> Result<Foreign, Error> {
        let NormSpec { rows, cols, .. } = self.spec;
        let expected = if tensor.shape() == TensorShape::Transposed { (cols, rows) } else { (rows, cols) };
        let got = (foreign.layout.rows, foreign.layout.cols);
        if got == expected {
            return Ok(foreign);
        }
        let rule = format!("expected {} rows of {} elements, got {} rows of {}", expected.0, expected.1, got.0, got.1);
        Err(Error::InvalidArgument { arg: tensor.name(), rule })
    }

    pub(crate) const fn tensor(&self, tensor: Tensor) -> Option<&Foreign> {
        self.tensors[tensor as usize].as_ref()
    }

    /// Removes a tensor. In place, the output that overwrites an input stands for it.
    pub(crate) const fn without(&mut self, tensor: Tensor) {
        self.tensors[tensor as usize] = None;
    }

    /// The three dtypes, each from the first tensor that has it. `run` refuses tensors that differ.
    pub(crate) fn dtypes(&self) -> Result<DTypes, Error> {
        let of = |tensors: &[Tensor]| {
            tensors.iter().find_map(|&tensor| Some(self.tensor(tensor)?.dtype(tensor))).transpose()
        };
        let (main, stream) = match self.direction {
            Direction::Forward | Direction::QuantizedForward => {
                ([Tensor::X, Tensor::Y], [Tensor::Residual, Tensor::ResidualOut])
            }
            Direction::Backward => ([Tensor::Dy, Tensor::Dx], [Tensor::X, Tensor::DresidualOut]),
        };
        let activation = match self.y_dtype {
            Some(dtype) => dtype,
            None => needed(main[0], of(&main)?)?,
        };
        let parameters =
            [Tensor::Weight, Tensor::Bias, Tensor::NextWeight, Tensor::NextBias, Tensor::Dweight, Tensor::Dbias];
        let weight = of(&parameters)?.unwrap_or(activation);
        Ok(DTypes { activation, weight, residual: of(&stream)?.unwrap_or(activation) })
    }

    /// Checks a mix of dtypes.
    ///
    /// # Errors
    /// As [`DTypes::check`], or as [`DTypes::check_cast`] if `y` has another dtype than `x`.
    pub(crate) fn check(&self, dtypes: DTypes) -> Result<(), Error> {
        if self.y_dtype.is_some() { dtypes.check_cast() } else { dtypes.check() }
    }

    /// The call without its tensors. It always includes a workspace.
    pub(crate) fn problem(&self) -> Result<Problem, Error> {
        let NormSpec { norm, rows, cols, weight_offset, cast_order, residual_placement, gate, groups, .. } = self.spec;
        let tensors = Tensor::ALL.into_iter().filter(|&tensor| self.tensor(tensor).is_some());
        let tensors = tensors.fold(TensorSet::NONE.with(Tensor::Workspace), TensorSet::with);
        let (dtypes, has_weight_offset) = (self.dtypes()?, weight_offset != 0.0);
        let problem = Problem::forward(norm, rows, cols, dtypes.activation, &[]);
        let Call { direction, quant, .. } = *self;
        Ok(Problem {
            direction,
            dtypes,
            tensors,
            has_weight_offset,
            cast_order,
            residual_placement,
            gate,
            groups,
            quant,
            ..problem
        })
    }

    /// Compiles its kernels for a CUDA device.
    pub(crate) fn prepare(&self, ordinal: usize) -> Result<(), Error> {
        let backend = device::cuda(ordinal)?;
        let _current = device::KeepCurrent::new()?;
        backend.prepare(&self.problem()?)
    }

    /// Runs on the backend of `place`, in the order of its stream.
    ///
    /// # Safety
    /// - Memory: each tensor's elements are at its address, with its layout and storage, on that
    ///   place, until the call is done.
    /// - Sharing: nobody else writes an input or uses an output meanwhile.
    /// - Stream: it belongs to the device's primary context, and is alive until this returns.
    ///
    /// # Errors
    /// As [`rmsnorm_core::NormBackend::forward`]; nothing is written then.
    pub(crate) unsafe fn run(&self, place: Place) -> Result<(), Error> {
        match place {
            Place::Cpu { threads } => {
                let backend = device::cpu(threads)?;
                // SAFETY:
                // - memory, sharing: the caller's promises.
                unsafe { self.run_on(&backend) }
            }
            Place::Cuda { ordinal, stream } => {
                let backend = device::cuda(ordinal)?;
                let _current = device::KeepCurrent::new()?;
                // SAFETY:
                // - stream: the caller's promise; it is used until `run_on` returns.
                let backend = unsafe { backend.on_raw(stream.cast()) };
                // SAFETY:
                // - memory, sharing: the caller's promises.
                unsafe { self.run_on(&backend) }
            }
        }
    }

    /// # Safety
    /// - Memory, sharing: as for [`run`](Self::run), on the device of `backend`.
    unsafe fn run_on<B: Lender>(&self, backend: &B) -> Result<(), Error> {
        let (dtypes, mut lent) = (self.dtypes()?, [const { None }; Tensor::COUNT]);
        self.check(dtypes)?;
        for (lent, tensor) in lent.iter_mut().zip(Tensor::ALL) {
            let Some(foreign) = self.tensor(tensor) else { continue };
            let expected = tensor.storage(self.direction, dtypes, self.quant.as_ref()).unwrap_or(foreign.storage);
            if foreign.storage != expected {
                let rule = format!("expected elements of {expected}, got {}", foreign.storage);
                return Err(Error::InvalidArgument { arg: self.arg_of(tensor).name(), rule });
            }
            // SAFETY:
            // - memory, sharing: the caller's promises.
            let found = unsafe { Lent::new(backend, foreign) };
            // The backend does not know the tensor's name.
            *lent = Some(found.map_err(|error| {
                let Error::InvalidArgument { rule, .. } = error else { return error };
                Error::InvalidArgument { arg: self.arg_of(tensor).name(), rule: format!("{rule}: pass a copy") }
            })?);
        }
        let tensors = Views { call: self, dtypes, lent: lent.each_mut().map(Option::as_mut) };
        match (self.direction, self.quant) {
            (Direction::Forward, _) => self.forward(backend, tensors),
            (Direction::Backward, _) => self.backward(backend, tensors),
            (Direction::QuantizedForward, Some(quant)) => self.quantized_forward(backend, quant, tensors),
            (Direction::QuantizedForward, None) => {
                Err(Error::Missing { arg: "quant", why: "a quantized call needs a `QuantSpec`" })
            }
        }
    }

    /// Overwrites `x` if there is none, and the residual if the call can overwrite it and there is
    /// none.
    fn forward<B: Lender>(&self, backend: &B, mut tensors: Views<'_, B>) -> Result<(), Error> {
        let y = tensors.rows_out(Tensor::Y);
        let (mut residual, sum) = (tensors.rows_in(Tensor::Residual), tensors.rows_out(Tensor::ResidualOut));
        let is_after = self.spec.residual_placement == ResidualPlacement::After;
        let (mut args, can_overwrite) = match (tensors.rows_in(Tensor::X), y) {
            (None, y) if self.y_dtype.is_some() => {
                let x = needed(Tensor::X, residual.take())?;
                (AnyForward::<B>::cast(x, needed(Tensor::Y, y)?), false)
            }
            (Some(x), None) if is_after => (AnyForward::<B>::added_to_residual(x), true),
            (Some(x), y) => (AnyForward::<B>::new(x, needed(Tensor::Y, y)?), is_after),
            (None, y) => (AnyForward::<B>::in_place(needed(Tensor::Y, y)?), true),
        };
        match residual {
            None if can_overwrite => args.residual = sum.map(Source::Overwrite),
            None => args.residual_out = sum,
            residual => (args.residual, args.residual_out) = (residual.map(Source::Read), sum),
        }
        args.dtypes = tensors.dtypes;
        args.weight = tensors.input(Tensor::Weight);
        args.bias = tensors.input(Tensor::Bias);
        args.mean = tensors.output(Tensor::Mean);
        args.rstd = tensors.output(Tensor::Rstd);
        args.next_weight = tensors.input(Tensor::NextWeight);
        args.next_bias = tensors.input(Tensor::NextBias);
        args.next_mean = tensors.output(Tensor::NextMean);
        args.next_rstd = tensors.output(Tensor::NextRstd);
        args.gate = tensors.rows_in(Tensor::Gate);
        backend.launch(AnyCall::Forward(Checked::forward(self.spec, args)?))
    }

    fn backward<B: Lender>(&self, backend: &B, mut tensors: Views<'_, B>) -> Result<(), Error> {
        let dy = needed(Tensor::Dy, tensors.rows_in(Tensor::Dy))?;
        let x = needed(Tensor::X, tensors.rows_in(Tensor::X))?;
        let rstd = needed(Tensor::Rstd, tensors.input(Tensor::Rstd))?;
        let (dx, dresidual) = (tensors.rows_out(Tensor::Dx), tensors.rows_out(Tensor::Dresidual));
        let mut args = if self.y_dtype.is_some() {
            AnyBackward::<B>::cast(dy, x, rstd, needed(Tensor::Dresidual, dresidual)?)
        } else {
            let mut args = AnyBackward::<B>::new(dy, x, rstd, needed(Tensor::Dx, dx)?);
            args.dresidual = dresidual;
            args
        };
        args.dtypes = tensors.dtypes;
        args.weight = tensors.input(Tensor::Weight);
        args.bias = tensors.input(Tensor::Bias);
        args.mean = tensors.input(Tensor::Mean);
        args.dresidual_out = tensors.rows_in(Tensor::DresidualOut);
        args.dweight = tensors.output(Tensor::Dweight);
        args.dbias = tensors.output(Tensor::Dbias);
        args.workspace = tensors.output(Tensor::Workspace);
        args.gate = tensors.rows_in(Tensor::Gate);
        args.dgate = tensors.rows_out(Tensor::Dgate);
        backend.launch(AnyCall::Backward(Checked::backward(backend, self.spec, args)?))
    }

    fn quantized_forward<B: Lender>(
        &self,
        backend: &B,
        quant: QuantSpec,
        mut tensors: Views<'_, B>,
    ) -> Result<(), Error> {
        let x = needed(Tensor::X, tensors.rows_in(Tensor::X))?;
        let codes = needed(Tensor::Codes, tensors.rows_out(Tensor::Codes))?;
        let mut args = AnyQuantizedForward::<B>::new(quant, x, codes);
        args.dtypes = tensors.dtypes;
        args.residual = tensors.rows_in(Tensor::Residual);
        args.weight = tensors.input(Tensor::Weight);
        args.bias = tensors.input(Tensor::Bias);
        args.y = tensors.rows_out(Tensor::Y);
        args.residual_out = tensors.rows_out(Tensor::ResidualOut);
        args.mean = tensors.output(Tensor::Mean);
        args.rstd = tensors.output(Tensor::Rstd);
        args.scale = tensors.input(Tensor::Scale);
        args.scales = tensors.output(Tensor::Scales).map(|scales| match quant.scale_type() {
            ScaleType::F32 => Scales::F32(scales),
            ScaleType::E8m0 => Scales::E8m0(scales),
        });
        backend.launch(AnyCall::QuantizedForward(Checked::quantized_forward(self.spec, args)?))
    }
}

/// A tensor that every call of the direction needs.
fn needed<T>(tensor: Tensor, found: Option<T>) -> Result<T, Error> {
    found.ok_or(Error::Missing { arg: tensor.name(), why: "every call of this direction needs it" })
}

/// The tensors of a call as views of a backend. Each view is taken once.
struct Views<'l, B: Lender> {
    call: &'l Call,
    dtypes: DTypes,
    lent: [Option<&'l mut Lent<B>>; Tensor::COUNT],
}

impl<'l, B: Lender> Views<'l, B> {
    fn input(&mut self, tensor: Tensor) -> Option<AnyIn<'l, B>> {
        Some(self.lent[tensor as usize].take()?.input())
    }

    fn output(&mut self, tensor: Tensor) -> Option<AnyOut<'l, B>> {
        Some(self.lent[tensor as usize].take()?.output())
    }

    fn rows_in(&mut self, tensor: Tensor) -> Option<Rows<AnyIn<'l, B>>> {
        Some(self.call.tensor(tensor)?.layout.rows(self.input(tensor)?))
    }

    fn rows_out(&mut self, tensor: Tensor) -> Option<Rows<AnyOut<'l, B>>> {
        Some(self.call.tensor(tensor)?.layout.rows(self.output(tensor)?))
    }
}
