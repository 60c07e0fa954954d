//! A call on foreign tensors: which norm, which tensors. From here on dtypes are types.

use rmsnorm_core::quant::{CodeType, QuantSpec, ScaleType};
use rmsnorm_core::{
    Backward, Code, DType, DTypes, Direction, Element, Error, F8E4M3, F8E5M2, Forward, NormSpec, Problem,
    QuantizedForward, Rows, Storage, Stored, Tensor, TensorSet, TensorShape, WithDTypes,
};

use crate::foreign::{Foreign, Place};
use crate::lender::{self, Lender};

/// A call: everything but where its tensors lie.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    pub(crate) direction: Direction,
    pub(crate) spec: NormSpec,
    pub(crate) quant: Option<QuantSpec>,
    tensors: [Option<Foreign>; Tensor::COUNT],
}

impl Call {
    /// A norm of that direction, with no tensors yet.
    pub(crate) const fn new(direction: Direction, spec: NormSpec) -> Self {
        Call { direction, spec, quant: None, tensors: [None; Tensor::COUNT] }
    }

    /// With that tensor.
    ///
    /// # Errors
    /// `InvalidArgument` if it is a matrix of another size than the call's, or a vector whose elements are apart.
    pub(crate) fn with(&mut self, tensor: Tensor, foreign: Foreign) -> Result<&mut Self, Error> {
        let foreign = if tensor.is_matrix() { self.matrix(tensor, foreign)? } else { foreign.flat(tensor)? };
        self.tensors[tensor as usize] = Some(foreign);
        Ok(self)
    }

    fn matrix(&self, tensor: Tensor, foreign: Foreign) -> Result<Foreign, Error> {
        let NormSpec { rows, cols, .. } = self.spec;
        let expected = if tensor.shape() == TensorShape::Transposed { (cols, rows) } else { (rows, cols) };
        let got = (foreign.layout.rows, foreign.layout.cols);
        if got == expected {
            return Ok(foreign);
        }
        let rule = format!("expected {} rows of {} elements, got {} of {}", expected.0, expected.1, got.0, got.1);
        Err(Error::InvalidArgument { arg: tensor.name(), rule })
    }

    pub(crate) const fn tensor(&self, tensor: Tensor) -> Option<&Foreign> {
        self.tensors[tensor as usize].as_ref()
    }

    /// Without that tensor: in place the output that overwrites it stands for it.
    pub(crate) const fn without(&mut self, tensor: Tensor) {
        self.tensors[tensor as usize] = None;
    }

    /// Whether `y` overwrites `x`.
    pub(crate) const fn is_in_place(&self) -> bool {
        self.tensor(Tensor::Y).is_some() && self.tensor(Tensor::X).is_none()
    }

    /// The three dtypes, each that of the first tensor that has it. Others that differ are refused when they are lent.
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
        let missing = Error::Missing { arg: main[0].name(), why: "every call has it" };
        let activation = of(&main)?.ok_or(missing)?;
        let weight = of(&[Tensor::Weight, Tensor::Bias, Tensor::Dweight, Tensor::Dbias])?.unwrap_or(activation);
        Ok(DTypes { activation, weight, residual: of(&stream)?.unwrap_or(activation) })
    }

    /// The call without its tensors. A backward call is told to have a workspace, as all of ours do.
    pub(crate) fn problem(&self) -> Result<Problem, Error> {
        let NormSpec { norm, rows, cols, .. } = self.spec;
        let tensors = Tensor::ALL.into_iter().filter(|&tensor| self.tensor(tensor).is_some());
        let tensors = tensors.fold(TensorSet::NONE, TensorSet::with);
        let dtypes = self.dtypes()?;
        let problem = match self.direction {
            Direction::Forward | Direction::QuantizedForward => {
                Problem::forward(norm, rows, cols, dtypes.activation, &[])
            }
            Direction::Backward => Problem::backward(norm, rows, cols, dtypes.activation, &[]),
        };
        Ok(Problem {
            direction: self.direction,
            dtypes,
            tensors: tensors.with(Tensor::Workspace),
            has_weight_offset: self.spec.weight_offset != 0.0,
            cast_order: self.spec.cast_order,
            quant: self.quant,
            ..problem
        })
    }

    /// Runs on the backend of that place, in the order of its stream.
    ///
    /// # Safety
    /// - Memory: each tensor's elements lie where its address, layout and storage say, on that place, until the call is done.
    /// - Sharing: nobody else writes an input or uses an output meanwhile.
    /// - Stream: it is one of the device's primary context, and alive until this returns.
    ///
    /// # Errors
    /// As [`rmsnorm_core::NormBackend::forward`]; nothing is written then.
    pub(crate) unsafe fn run(&self, place: Place) -> Result<(), Error> {
        // SAFETY:
        // - memory, sharing, stream: the caller's promises.
        unsafe { lender::on(place, self) }
    }

    /// Runs on this backend.
    ///
    /// # Safety
    /// As [`run`](Self::run), with the backend in the place of the place.
    pub(crate) unsafe fn run_on<B: Lender>(&self, backend: &B) -> Result<(), Error> {
        self.dtypes()?.dispatch(Run { call: self, backend })?
    }

    /// A tensor as a backend takes it, if the call has it.
    fn lend<B: Lender, E: Stored>(&self, backend: &B, tensor: Tensor) -> Result<Option<B::Lent<E>>, Error> {
        let Some(foreign) = self.tensor(tensor) else { return Ok(None) };
        if foreign.storage != E::STORAGE {
            let rule = format!("expected elements of {}, got {}", E::STORAGE, foreign.storage);
            return Err(Error::InvalidArgument { arg: tensor.name(), rule });
        }
        // SAFETY:
        // - memory: promised to `run_on`; its elements are of this type, as was just checked, and as many as the layout spans.
        let lent = unsafe { backend.lend(foreign.data, foreign.layout.span()) };
        // A backend that is lent an address does not know whose it is.
        lent.map(Some).map_err(|error| {
            let Error::InvalidArgument { rule, .. } = error else { return error };
            Error::InvalidArgument { arg: tensor.name(), rule: format!("{rule}: pass a copy") }
        })
    }

    /// A view of a matrix, with its strides.
    fn rows<V>(&self, tensor: Tensor, view: V) -> Rows<V> {
        match self.tensor(tensor) {
            Some(foreign) => foreign.layout.rows(view),
            None => Rows::dense(view),
        }
    }
}

/// A call on a backend, for types.
struct Run<'c, B> {
    call: &'c Call,
    backend: &'c B,
}

impl<B: Lender> WithDTypes for Run<'_, B> {
    type Output = Result<(), Error>;

    fn call<T: Element, W: Element, R: Element>(self) -> Self::Output {
        match (self.call.direction, self.call.quant) {
            (Direction::Forward, _) => self.forward::<T, W, R>(),
            (Direction::Backward, _) => self.backward::<T, W, R>(),
            (Direction::QuantizedForward, Some(quant)) => match quant.codes {
                CodeType::E4m3 => self.quantized_forward::<T, F8E4M3, W, R>(quant),
                CodeType::E5m2 => self.quantized_forward::<T, F8E5M2, W, R>(quant),
                CodeType::Int8 => self.quantized_forward::<T, i8, W, R>(quant),
            },
            (Direction::QuantizedForward, None) => {
                Err(Error::Missing { arg: "quant", why: "a quantized call says how" })
            }
        }
    }
}

/// Lends the tensors that a call may have, makes its arguments, then gives each of them to its builder method.
macro_rules! give {
    ($run:ident, $args:ident = $make:expr; $($kind:ident $tensor:ident $element:ty => $method:ident;)*) => {
        $(give!(@lend $kind $method = $run.call.lend::<B, $element>($run.backend, Tensor::$tensor)?);)*
        let mut $args = $make;
        $(
            if let Some(lent) = give!(@$kind $method) {
                $args = $args.$method(give!(@view $kind $run $tensor lent));
            }
        )*
    };
    (@lend input $method:ident = $lent:expr) => { let $method = $lent; };
    (@lend rows_in $method:ident = $lent:expr) => { let $method = $lent; };
    (@lend output $method:ident = $lent:expr) => { let mut $method = $lent; };
    (@lend rows_out $method:ident = $lent:expr) => { let mut $method = $lent; };
    (@input $method:ident) => { &$method };
    (@rows_in $method:ident) => { &$method };
    (@output $method:ident) => { &mut $method };
    (@rows_out $method:ident) => { &mut $method };
    (@view input $run:ident $tensor:ident $lent:ident) => { B::input($lent) };
    (@view output $run:ident $tensor:ident $lent:ident) => { B::output($lent) };
    (@view rows_in $run:ident $tensor:ident $lent:ident) => { $run.call.rows(Tensor::$tensor, B::input($lent)) };
    (@view rows_out $run:ident $tensor:ident $lent:ident) => { $run.call.rows(Tensor::$tensor, B::output($lent)) };
}

impl<B: Lender> Run<'_, B> {
    /// A tensor that every call of the direction has.
    fn need<E: Stored>(&self, tensor: Tensor) -> Result<B::Lent<E>, Error> {
        let missing = Error::Missing { arg: tensor.name(), why: "every call of this direction has it" };
        self.call.lend(self.backend, tensor)?.ok_or(missing)
    }

    fn forward<T: Element, W: Element, R: Element>(self) -> Result<(), Error> {
        let (x, mut y) = (self.call.lend::<B, T>(self.backend, Tensor::X)?, self.need::<T>(Tensor::Y)?);
        let mut sum = self.call.lend::<B, R>(self.backend, Tensor::ResidualOut)?;
        give!(self, args = {
            let y = self.call.rows(Tensor::Y, B::output(&mut y));
            let args = match &x {
                Some(x) => Forward::<B, T>::new(self.call.rows(Tensor::X, B::input(x)), y),
                None => Forward::in_place(y),
            };
            args.weight_dtype::<W>().residual_dtype::<R>()
        };
            rows_in Residual R => residual;
            input Weight W => weight;
            input Bias W => bias;
            output Mean f32 => mean;
            output Rstd f32 => rstd;
        );
        if let Some(sum) = &mut sum {
            let rows = self.call.rows(Tensor::ResidualOut, B::output(sum));
            args = if x.is_some() { args.residual_out(rows) } else { args.residual_in_place(rows) };
        }
        self.backend.forward(&self.call.spec, args)
    }

    fn backward<T: Element, W: Element, R: Element>(self) -> Result<(), Error> {
        let (dy, x) = (self.need::<T>(Tensor::Dy)?, self.need::<R>(Tensor::X)?);
        let (rstd, mut dx) = (self.need::<f32>(Tensor::Rstd)?, self.need::<T>(Tensor::Dx)?);
        give!(self, args = {
            let (dy, x) = (self.call.rows(Tensor::Dy, B::input(&dy)), self.call.rows(Tensor::X, B::input(&x)));
            let dx = self.call.rows(Tensor::Dx, B::output(&mut dx));
            Backward::<B, T, T, R>::mixed(dy, x, B::input(&rstd), dx).weight_dtype::<W>()
        };
            input Weight W => weight;
            input Mean f32 => mean;
            rows_in DresidualOut R => dresidual_out;
            output Dweight W => dweight;
            output Dbias W => dbias;
            output Workspace f32 => workspace;
            rows_out Dresidual R => dresidual;
        );
        self.backend.backward(&self.call.spec, args)
    }

    fn quantized_forward<T: Element, C: Code, W: Element, R: Element>(self, quant: QuantSpec) -> Result<(), Error> {
        let (x, mut codes) = (self.need::<T>(Tensor::X)?, self.need::<C>(Tensor::Codes)?);
        let (mut scales, mut scales_e8m0) = (None, None);
        match quant.scale_type() {
            ScaleType::F32 => scales = self.call.lend::<B, f32>(self.backend, Tensor::Scales)?,
            ScaleType::E8m0 => scales_e8m0 = self.call.lend::<B, u8>(self.backend, Tensor::Scales)?,
        }
        give!(self, args = {
            let x = self.call.rows(Tensor::X, B::input(&x));
            let codes = self.call.rows(Tensor::Codes, B::output(&mut codes));
            QuantizedForward::<B, T, C>::new(quant, x, codes).weight_dtype::<W>().residual_dtype::<R>()
        };
            rows_in Residual R => residual;
            input Weight W => weight;
            input Bias W => bias;
            rows_out Y T => y;
            rows_out ResidualOut R => residual_out;
            output Mean f32 => mean;
            output Rstd f32 => rstd;
            input Scale f32 => scale;
        );
        if let Some(scales) = &mut scales {
            args = args.scales(B::output(scales));
        }
        if let Some(scales) = &mut scales_e8m0 {
            args = args.scales_e8m0(B::output(scales));
        }
        self.backend.quantized_forward(&self.call.spec, args)
    }
}

/// The storage that a tensor of a call has, where it does not depend on the caller's tensors.
pub(crate) const F32: Storage = Storage::Float(DType::F32);
