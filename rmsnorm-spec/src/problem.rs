//! Validation: once, the same for every backend, before anything runs.
//!
//! Only this module builds a [`Checked`], so a value of it proves the guarantees of [`Problem`].
//! Backends cite that proof in their SAFETY comments instead of checking again.

mod call;
mod columns;
mod layout;
mod sharded_rows;
#[cfg(test)]
mod tests;

use crate::args::Views;
use crate::quant::{QuantSpec, ScaleKind, ScaleType};
use crate::{
    AnyBackward, AnyForward, Backward, CastOrder, Code, DType, DTypes, Direction, Element, Error, Forward, Gate,
    GradReduction, GradStore, Norm, NormBackend, NormSpec, PieceSet, QuantizedForward, ResidualPlacement, Role, Scales,
    Slot, Source, Storage, Tensor, TensorSet, Visitor,
};
pub use call::{AnyCall, Statistics};
pub use columns::check_columns_form;
use layout::Layout;

/// The place of a view in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Identifies the allocation; views of different allocations never overlap. 0 where addresses
    /// are global.
    pub allocation: u64,
    /// Byte address, or offset within the allocation, of the first element.
    pub start: u64,
    /// Number of elements.
    pub len: usize,
}

impl Span {
    /// The span of a slice of host memory, whose addresses are global.
    pub fn of<T>(slice: &[T]) -> Self {
        Span { allocation: 0, start: slice.as_ptr().addr() as u64, len: slice.len() }
    }
}

/// A validated call without its pointers and without its floats (except those of `quant`): the
/// input of a plan, comparable and hashable.
///
/// A `Problem` inside a [`Checked`] guarantees:
/// - `cols >= 1`; `rows * cols` elements of every dtype fit `isize::MAX` bytes, strides included;
/// - every matrix has a row stride of at least the length of its rows (`cols`; `rows` for `codes_t`
///   and `codes_columnwise`), and reaches from row 0 to the end of the last row;
/// - groups of rows follow one another in memory, and all grouped matrices have the same number of
///   rows in each group;
/// - `groups` is at least 1 and divides `cols`; there is 1 with a residual after the norm;
/// - `weight`, `bias`, `dweight`, `dbias` have `cols` elements, `mean` and `rstd` have
///   `rows * groups`, those of a row side by side;
/// - forward has `mean` only for layer norm; backward has `mean` exactly for layer norm, and always
///   `rstd`;
/// - gradients of weight and bias are all rounded or all f32 sums; sums are `dweight` and `dbias`
///   with f32 storage ([`grad_store`](Self::grad_store)), and the backend supports them;
/// - weight and residual dtypes are each the activations' dtype or f32, and every view has the type
///   that the dtypes give its tensor; in a cast ([`TensorSet::is_cast`]) the residual dtype may also
///   have 16 bits while the activations' is f32;
/// - forward that is a cast reads `residual` and has no `x` and no `residual_out`, one part, no
///   residual after the norm and no gate before it; backward that is a cast has `dresidual` and no
///   `dx`;
/// - `workspace`, if present, has at least [`NormBackend::workspace_len`] elements;
/// - no output overlaps any other tensor of the call;
/// - `x` and a `residual` that is added before the norm are both overwritten or neither is;
/// - with a residual that is added after the norm there are `x` and `residual_out`, and also
///   `residual` unless `residual_out` overwrites it; `y` may be missing, and then `next_weight`,
///   `next_bias`, `next_mean` and `next_rstd` are missing too; no other call has these four. RMS
///   norm has no `next_mean`;
/// - `gate`, the tensor, is there exactly with `gate`, the field; then there is one part of `x`, and
///   no residual after the norm; with a gate before the norm there is no residual, and the residual
///   dtype is the activations';
/// - with a weight before the norm ([`CastOrder::WeightFirst`]) there are a weight and one part of
///   `x`, no residual and no gate before the norm, and the residual dtype is the activations';
/// - backward has `bias` only with a gate after the norm, and `dgate` only with a gate;
/// - with several `parts`, `x` is not overwritten, the residual is added before the norm, and `x`
///   reaches to the end of the last part;
/// - `eps` is finite and not negative, `weight_offset` finite;
/// - `quant` is present in a quantized call, and its fields are consistent ([`QuantSpec::check`]);
///   `scale`, `scales`, `amax` and `codes_t` are present or absent as its kind of scale requires,
///   with its types and lengths; the rows of `codes_t` are not in groups;
/// - `codes_columnwise` and `scales_columnwise` are present together, only with scales of blocks,
///   with `rstd` and layer norm's `mean`, and with its lengths and types; the rows of
///   `codes_columnwise` are not in groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Problem {
    /// The direction.
    pub direction: Direction,
    /// The kind of norm.
    pub norm: Norm,
    /// Rows of every matrix.
    pub rows: usize,
    /// Elements of every row.
    pub cols: usize,
    /// The dtypes of the activations, the weight and the residual stream.
    pub dtypes: DTypes,
    /// The tensors of the call. In place it has `y` and no `x`. If a residual is overwritten, it
    /// has `residual_out` and no `residual`.
    pub tensors: TensorSet,
    /// The rows of a group, if a matrix has groups ([`Rows::grouped`](crate::Rows::grouped)): at
    /// least 2, and fewer than `rows`. All grouped matrices of a call have the same number. `None`
    /// if every matrix has one stride.
    pub rows_per_group: Option<usize>,
    /// Whether a non-zero `weight_offset` is added.
    pub has_weight_offset: bool,
    /// The roundings on the way to `y`, and the place of the weight.
    pub cast_order: CastOrder,
    /// Where forward adds the residual; the default in other calls, which do not depend on it.
    pub residual_placement: ResidualPlacement,
    /// The number of matrices that `x` is the sum of, at least 1.
    pub parts: usize,
    /// The gate, if the call has one.
    pub gate: Option<Gate>,
    /// The groups of columns, each with its own statistics: at least 1, a divisor of `cols`.
    pub groups: usize,
    /// How weight gradients are summed; the default in forward.
    pub grad_reduction: GradReduction,
    /// How weight gradients are stored; the default in forward.
    pub grad_store: GradStore,
    /// How the result is quantized, if it is.
    pub quant: Option<QuantSpec>,
}

impl Problem {
    /// A forward problem with these tensors besides `x` and `y`, of one dtype, without a weight
    /// offset, and with the default cast order.
    pub fn forward(norm: Norm, rows: usize, cols: usize, dtype: DType, tensors: impl Into<TensorSet>) -> Self {
        let tensors = tensors.into().with(Tensor::X).with(Tensor::Y);
        Problem::uniform(Direction::Forward, norm, (rows, cols), dtype, tensors)
    }

    /// A backward problem with these tensors besides `dy`, `x`, `dx` and the statistics of the
    /// norm, of one dtype, without a weight offset, and with the default reduction.
    pub fn backward(norm: Norm, rows: usize, cols: usize, dtype: DType, tensors: impl Into<TensorSet>) -> Self {
        let required = TensorSet::of(&[Tensor::Dy, Tensor::X, Tensor::Dx, Tensor::Rstd]);
        let tensors = tensors.into().union(required).set(Tensor::Mean, matches!(norm, Norm::Layer));
        Problem::uniform(Direction::Backward, norm, (rows, cols), dtype, tensors)
    }

    /// A quantized forward problem with these tensors besides `x`, `codes` and the scale tensors of
    /// `quant`, of one dtype, without a weight offset, and with the default cast order.
    pub fn quantized_forward(
        norm: Norm,
        rows: usize,
        cols: usize,
        dtype: DType,
        quant: QuantSpec,
        tensors: impl Into<TensorSet>,
    ) -> Self {
        let scales = if quant.scale == ScaleKind::Given { Tensor::Scale } else { Tensor::Scales };
        let tensors = tensors.into().with(Tensor::X).with(Tensor::Codes).with(scales);
        let problem = Problem::uniform(Direction::QuantizedForward, norm, (rows, cols), dtype, tensors);
        Problem { quant: Some(quant), ..problem }
    }

    fn uniform(
        direction: Direction,
        norm: Norm,
        (rows, cols): (usize, usize),
        dtype: DType,
        tensors: TensorSet,
    ) -> Self {
        Problem {
            direction,
            norm,
            rows,
            cols,
            dtypes: DTypes::uniform(dtype),
            tensors,
            rows_per_group: None,
            has_weight_offset: false,
            cast_order: CastOrder::default(),
            residual_placement: ResidualPlacement::default(),
            parts: 1,
            gate: None,
            groups: 1,
            grad_reduction: GradReduction::default(),
            grad_store: GradStore::default(),
            quant: None,
        }
    }

    /// Refuses groups of columns, for a backend (named `backend`) without them.
    ///
    /// # Errors
    /// `Unsupported` if there are several.
    pub fn require_one_group(&self, backend: &str) -> Result<(), Error> {
        match self.groups {
            1 => Ok(()),
            _ => Err(Error::Unsupported { rule: format!("the {backend} backend has no groups of columns") }),
        }
    }

    /// Refuses scales of columns of several groups, for a backend (named `backend`) without them.
    ///
    /// # Errors
    /// `Unsupported` for scales of rows or of blocks of columns, unless the columns of a group are a
    /// multiple of a block's.
    /// ```
    /// # use rmsnorm_spec::quant::{CodeType, QuantSpec, ScaleKind};
    /// # use rmsnorm_spec::{DType, Norm, Problem};
    /// let quant = QuantSpec::new(CodeType::E4m3, ScaleKind::Row);
    /// let rows = Problem::quantized_forward(Norm::Rms, 4, 64, DType::F32, quant, &[]);
    /// let refused = Problem { groups: 2, ..rows }.require_scales_in_groups("mine").unwrap_err();
    /// let rule = "the mine backend has no scales of columns of several groups, got scales of 64 columns and groups of 32: \
    ///             quantize y in a second call";
    /// assert_eq!(refused.to_string(), format!("unsupported: {rule}"));
    /// assert!(rows.require_scales_in_groups("mine").is_ok());
    /// ```
    pub fn require_scales_in_groups(&self, backend: &str) -> Result<(), Error> {
        let width = self.cols / self.groups;
        match self.quant.and_then(|quant| quant.scale.set_cols(self.cols)) {
            Some(set) if self.groups > 1 && !width.is_multiple_of(set) => {
                let got = format!("got scales of {set} columns and groups of {width}: quantize y in a second call");
                let rule = format!("the {backend} backend has no scales of columns of several groups, {got}");
                Err(Error::Unsupported { rule })
            }
            Some(_) | None => Ok(()),
        }
    }

    /// Refuses pieces of a norm that a backend (named `backend`) lacks.
    ///
    /// # Errors
    /// `Unsupported`, which names the first piece that is not among `pieces`.
    /// ```
    /// # use rmsnorm_spec::{DType, Norm, Piece, PieceSet, Problem};
    /// let sum = Problem { parts: 3, ..Problem::forward(Norm::Rms, 4, 8, DType::F32, &[]) };
    /// assert!(sum.require_pieces("mine", PieceSet::of(&[Piece::Parts])).is_ok());
    /// let refused = sum.require_pieces("mine", PieceSet::NONE).unwrap_err();
    /// assert_eq!(refused.to_string(), "unsupported: the mine backend adds no parts of x");
    /// ```
    pub fn require_pieces(&self, backend: &str, pieces: PieceSet) -> Result<(), Error> {
        match self.pieces().difference(pieces).iter().next() {
            None => Ok(()),
            Some(piece) => Err(Error::Unsupported { rule: format!("the {backend} backend {}", piece.lack()) }),
        }
    }

    /// Whether the call has the tensor.
    pub const fn has(&self, tensor: Tensor) -> bool {
        self.tensors.has(tensor)
    }

    /// The argument name of a tensor. In place, `Y` is called `x`, and the `ResidualOut` that
    /// overwrites a residual `residual`. Gradients stored as f32 sums are called `dweight_sum` and
    /// `dbias_sum`.
    pub const fn arg(&self, tensor: Tensor) -> &'static str {
        let is_sum = matches!(self.grad_store, GradStore::Sum | GradStore::Accumulated);
        if let Some(arg) = self.tensors.arg_of_cast(tensor) {
            return arg;
        }
        match (tensor, self.has(Tensor::X), self.has(Tensor::Residual)) {
            (Tensor::Y, false, false) => Tensor::X.name(),
            (Tensor::ResidualOut, _, false) => Tensor::Residual.name(),
            (Tensor::Dweight, ..) if is_sum => "dweight_sum",
            (Tensor::Dbias, ..) if is_sum => "dbias_sum",
            (tensor, _, _) => tensor.name(),
        }
    }

    /// The storage of a tensor's elements; `None` for codes and scales of a call that is not
    /// quantized.
    pub const fn storage(&self, tensor: Tensor) -> Option<Storage> {
        let is_gradient = matches!(tensor.role(self.direction), Role::Gradient);
        if is_gradient && !matches!(self.grad_store, GradStore::Rounded) {
            return Some(Storage::Float(DType::F32));
        }
        tensor.storage(self.direction, self.dtypes, self.quant.as_ref())
    }
}

/// Checks a forward call, except the layout of its tensors.
fn check_forward<B: NormBackend + ?Sized, T: Element, W: Element, R: Element>(
    spec: &NormSpec,
    args: &Forward<'_, B, T, W, R>,
) -> Result<(), Error> {
    check_spec(spec)?;
    check_order(args.lost)?;
    let is_cast = args.x.is_none();
    check_mix(args.dtypes, is_cast)?;
    check_gate(spec, args.gate.is_some(), args.residual.is_some() && !is_cast)?;
    check_weight_first(spec, args.weight.is_some(), args.residual.is_some(), is_cast)?;
    match (&args.x, spec.residual_placement) {
        (None, _) => check_cast(spec, args)?,
        (Some(x), ResidualPlacement::Before) => check_targets(x, args)?,
        (Some(x), ResidualPlacement::After) => check_targets_after(x, args)?,
    }
    forbid_mean(spec, "mean", args.mean.is_some())?;
    forbid_mean(spec, "next_mean", args.next_mean.is_some())?;
    check_parts(spec, args)
}

/// Arguments that have passed validation.
#[derive(Debug)]
pub struct Checked<A> {
    spec: NormSpec,
    args: A,
    problem: Problem,
}

impl<A> Checked<A> {
    /// The norm that is computed.
    pub const fn spec(&self) -> &NormSpec {
        &self.spec
    }

    /// The call without its pointers.
    pub const fn problem(&self) -> &Problem {
        &self.problem
    }

    /// The arguments of the call.
    pub fn into_args(self) -> A {
        self.args
    }

    /// The same call with converted arguments.
    fn change<U>(self, change: impl FnOnce(A) -> Result<U, Error>) -> Result<Checked<U>, Error> {
        let Checked { spec, args, problem } = self;
        Ok(Checked { spec, args: change(args)?, problem })
    }
}

impl<'a, B: NormBackend + ?Sized, T: Element, W: Element, R: Element> Checked<Forward<'a, B, T, W, R>> {
    /// Validates a forward call.
    ///
    /// For backends whose calls have another form than the trait's, such as recording into an
    /// encoder.
    ///
    /// # Errors
    /// The first rule of [`Problem`] that fails, as the variant of [`Error`] that names the
    /// argument.
    pub fn forward(spec: NormSpec, args: Forward<'a, B, T, W, R>) -> Result<Self, Error> {
        check_forward(&spec, &args)?;
        let found = Layout::check(&spec, (Direction::Forward, args.dtypes), None, args.parts, &args)?;
        let problem = problem(Direction::Forward, &spec, args.dtypes, found);
        let parts = args.parts.map_or(1, |parts| parts.count);
        let problem = Problem { residual_placement: spec.residual_placement, parts, ..problem };
        Ok(Checked { spec, args, problem })
    }

    /// Elements from one part of `x` to the next; 0 for one part.
    pub fn part_stride(&self) -> usize {
        self.args.parts.filter(|parts| parts.count > 1).map_or(0, |parts| parts.stride)
    }

    /// Passes every tensor to the visitor, in the order of [`Tensor::ALL`]; an in-place output
    /// comes in its input's place.
    ///
    /// # Errors
    /// The first of the visitor's.
    pub fn visit(self, visitor: &mut impl Visitor<'a, B>) -> Result<(), Error> {
        self.args.visit(visitor)
    }
}

impl<'a, B: NormBackend + ?Sized, T: Element, W: Element, R: Element> Checked<Backward<'a, B, T, W, R>> {
    /// Validates a backward call. The backend determines the length of the workspace.
    ///
    /// For backends whose calls have another form than the trait's, such as recording into an
    /// encoder.
    ///
    /// # Errors
    /// As [`Checked::forward`].
    pub fn backward(
        backend: &(impl NormBackend + ?Sized),
        spec: NormSpec,
        args: Backward<'a, B, T, W, R>,
    ) -> Result<Self, Error> {
        check_spec(&spec)?;
        check_order(args.lost)?;
        let is_cast = args.dx.is_none();
        check_mix(args.dtypes, is_cast)?;
        forbid_mean(&spec, "mean", args.mean.is_some())?;
        let has_residual = args.dresidual_out.is_some() || args.dresidual.is_some();
        check_gate(&spec, args.gate.is_some(), has_residual)?;
        check_weight_first(&spec, args.weight.is_some(), has_residual, is_cast)?;
        check_gradients(&spec, &args)?;
        if spec.norm == Norm::Layer && args.mean.is_none() {
            return Err(Error::Missing {
                arg: "mean",
                why: "layer norm's backward pass needs the forward pass's mean",
            });
        }
        if args.grad_reduction == (GradReduction::Locks { groups: 0 }) {
            let rule = "GradReduction::Locks needs at least 1 group, got 0".into();
            return Err(Error::InvalidArgument { arg: "grad_reduction", rule });
        }
        let grad_store = grad_store(&args)?;
        let found = Layout::check(&spec, (Direction::Backward, args.dtypes), None, None, &args)?;
        let problem = problem(Direction::Backward, &spec, args.dtypes, found);
        let problem = Problem { grad_reduction: args.grad_reduction, grad_store, ..problem };
        if let Some(workspace) = &args.workspace {
            let (min, got) = (backend.workspace_len(&problem), B::out_span::<f32>(workspace).len);
            if got < min {
                return Err(Error::Length { arg: "workspace", min, max: usize::MAX, got });
            }
        }
        if grad_store != GradStore::Rounded && !backend.has_gradient_sums() {
            let name = backend.name();
            let rule = format!("the {name} backend has no f32 sums of gradients, dweight_sum and dbias_sum");
            return Err(Error::Unsupported { rule });
        }
        Ok(Checked { spec, args, problem })
    }

    /// Hands every tensor to the visitor, in the order of [`Tensor::ALL`].
    ///
    /// # Errors
    /// The first of the visitor's.
    pub fn visit(self, visitor: &mut impl Visitor<'a, B>) -> Result<(), Error> {
        self.args.visit(visitor)
    }
}

impl<'a, B, T, C, W, R> Checked<QuantizedForward<'a, B, T, C, W, R>>
where
    B: NormBackend + ?Sized,
    T: Element,
    C: Code,
    W: Element,
    R: Element,
{
    /// Validates a quantized forward call.
    ///
    /// For backends whose calls have another form than the trait's, such as recording into an
    /// encoder.
    ///
    /// # Errors
    /// As [`Checked::forward`].
    pub fn quantized_forward(spec: NormSpec, args: QuantizedForward<'a, B, T, C, W, R>) -> Result<Self, Error> {
        check_spec(&spec)?;
        check_order(args.lost)?;
        args.dtypes.check()?;
        args.quant.check()?;
        check_codes(&args)?;
        check_scales(&args)?;
        check_columnwise(&spec, &args)?;
        if spec.residual_placement == ResidualPlacement::After {
            let rule = "no call adds a residual after the norm and quantizes the result".into();
            return Err(Error::Unsupported { rule });
        }
        check_gate(&spec, args.gate.is_some(), args.residual.is_some())?;
        check_weight_first(&spec, args.weight.is_some(), args.residual.is_some(), false)?;
        forbid_mean(&spec, "mean", args.mean.is_some())?;
        if args.residual.is_none() && args.residual_out.is_some() {
            return Err(Error::Unexpected { arg: "residual_out", why: "there is no residual to add" });
        }
        let direction = Direction::QuantizedForward;
        let found = Layout::check(&spec, (direction, args.dtypes), Some(&args.quant), None, &args)?;
        let problem = problem(direction, &spec, args.dtypes, found);
        Ok(Checked { spec, problem: Problem { quant: Some(args.quant), ..problem }, args })
    }

    /// Hands every tensor to the visitor, in the order of [`Tensor::ALL`].
    ///
    /// # Errors
    /// The first of the visitor's.
    pub fn visit(self, visitor: &mut impl Visitor<'a, B>) -> Result<(), Error> {
        self.args.visit(visitor)
    }
}

impl<'a, B: NormBackend + ?Sized> Checked<AnyForward<'a, B>> {
    /// The same call with types.
    ///
    /// # Errors
    /// `InvalidArgument` if a view has not the type that is named here.
    pub fn restore<T: Element, W: Element, R: Element>(self) -> Result<Checked<Forward<'a, B, T, W, R>>, Error> {
        self.change(AnyForward::restore)
    }
}

impl<'a, B: NormBackend + ?Sized> Checked<AnyBackward<'a, B>> {
    /// The same call with types.
    ///
    /// # Errors
    /// `InvalidArgument` if a view has not the type that is named here.
    pub fn restore<T: Element, W: Element, R: Element>(self) -> Result<Checked<Backward<'a, B, T, W, R>>, Error> {
        self.change(AnyBackward::restore)
    }
}

/// `codes` has the type that the spec names. `codes_t` needs one scale for the whole tensor: other
/// scales belong to rows, and a transposed matrix has other rows.
fn check_codes<B: NormBackend + ?Sized, T: Element, C: Code, W: Element, R: Element>(
    args: &QuantizedForward<'_, B, T, C, W, R>,
) -> Result<(), Error> {
    let got = B::out_storage::<C>(&args.codes.view);
    if got != Storage::Code(args.quant.codes) {
        let rule = format!("QuantSpec::codes asks for {} elements, got {got}", args.quant.codes);
        return Err(Error::InvalidArgument { arg: "codes", rule });
    }
    match (&args.codes_t, args.quant.scale) {
        (Some(codes_t), ScaleKind::Given | ScaleKind::Current) if codes_t.groups.is_some() => {
            let rule = "its rows cannot be grouped: pass a dense view, or Rows::strided".into();
            Err(Error::InvalidArgument { arg: "codes_t", rule })
        }
        (Some(_), ScaleKind::Row | ScaleKind::Block { .. } | ScaleKind::Mx { .. }) => {
            let why = "it needs one scale for the whole tensor, ScaleKind::Given or ScaleKind::Current";
            Err(Error::Unexpected { arg: "codes_t", why })
        }
        (None, _) | (Some(_), ScaleKind::Given | ScaleKind::Current) => Ok(()),
    }
}

/// The caller passes `scale` or receives `scales`, and received scales have the spec's type.
fn check_scales<B: NormBackend + ?Sized, T: Element, C: Code, W: Element, R: Element>(
    args: &QuantizedForward<'_, B, T, C, W, R>,
) -> Result<(), Error> {
    let unexpected = |arg, why| Err(Error::Unexpected { arg, why });
    let is_given = args.quant.scale == ScaleKind::Given;
    match (is_given, &args.scale) {
        (true, None) => return Err(Error::Missing { arg: "scale", why: "ScaleKind::Given reads it: pass scale(..)" }),
        (false, Some(_)) => return unexpected("scale", "only ScaleKind::Given reads it; other kinds write scales"),
        (true, Some(_)) | (false, None) => {}
    }
    let got = match (is_given, &args.scales) {
        (true, Some(_)) => return unexpected("scales", "ScaleKind::Given reads scale and writes no scales"),
        (false, None) => {
            let why = "the codes cannot be decoded without it: pass scales(..) or scales_e8m0(..)";
            return Err(Error::Missing { arg: "scales", why });
        }
        (true, None) => None,
        (false, Some(Scales::F32(_))) => Some(ScaleType::F32),
        (false, Some(Scales::E8m0(_))) => Some(ScaleType::E8m0),
    };
    let expected = args.quant.scale_type();
    if let Some(got) = got.filter(|got| *got != expected) {
        let rule =
            format!("{:?} in {:?} writes scales as {expected:?}, got {got:?}", args.quant.scale, args.quant.layout);
        return Err(Error::InvalidArgument { arg: "scales", rule });
    }
    match (is_given, &args.amax) {
        (false, Some(_)) => unexpected("amax", "only ScaleKind::Given writes it; here it follows from scales"),
        (_, None) if args.quant.folds_amax => {
            Err(Error::Missing { arg: "amax", why: "QuantSpec::folds_amax updates it: pass amax(..)" })
        }
        (true, Some(_)) | (_, None) => Ok(()),
    }
}

/// `codes_columnwise` comes with its scales, with scales of blocks, and with the statistics: a
/// block spans several rows, whose statistics an earlier pass computes.
fn check_columnwise<B: NormBackend + ?Sized, T: Element, C: Code, W: Element, R: Element>(
    spec: &NormSpec,
    args: &QuantizedForward<'_, B, T, C, W, R>,
) -> Result<(), Error> {
    let (codes, scales) = ("codes_columnwise", "scales_columnwise");
    let missing = |arg, why| Err(Error::Missing { arg, why });
    let got = match (&args.codes_columnwise, &args.scales_columnwise) {
        (None, None) => return Ok(()),
        (None, Some(_)) => {
            let why = "there are no codes_columnwise that it belongs to: pass both, or neither";
            return Err(Error::Unexpected { arg: scales, why });
        }
        (Some(_), None) => {
            let why = "codes_columnwise cannot be decoded without it: pass scales_columnwise(..) or \
                scales_columnwise_e8m0(..)";
            return missing(scales, why);
        }
        (Some(_), Some(Scales::F32(_))) => ScaleType::F32,
        (Some(_), Some(Scales::E8m0(_))) => ScaleType::E8m0,
    };
    if !args.quant.has_columnwise() {
        let why = "only ScaleKind::Block and ScaleKind::Mx have codes along columns";
        return Err(Error::Unexpected { arg: codes, why });
    }
    if args.codes_columnwise.as_ref().is_some_and(|rows| rows.groups.is_some()) {
        let rule = "its rows cannot be grouped: pass a dense view, or Rows::strided".into();
        return Err(Error::InvalidArgument { arg: codes, rule });
    }
    let (quant, expected) = (args.quant.columnwise(), args.quant.columnwise().scale_type());
    if got != expected {
        let rule = format!("{:?} in {:?} writes scales as {expected:?}, got {got:?}", quant.scale, quant.layout);
        return Err(Error::InvalidArgument { arg: scales, rule });
    }
    match (spec.norm, &args.mean, &args.rstd) {
        (_, _, None) => missing("rstd", "codes_columnwise is computed from it: pass rstd(..)"),
        (Norm::Layer, None, Some(_)) => missing("mean", "codes_columnwise is computed from it: pass mean(..)"),
        (Norm::Rms | Norm::L2 | Norm::L2Clamped, _, Some(_)) | (Norm::Layer, Some(_), Some(_)) => Ok(()),
    }
}

fn problem(
    direction: Direction,
    spec: &NormSpec,
    dtypes: DTypes,
    (tensors, rows_per_group): (TensorSet, Option<usize>),
) -> Problem {
    Problem {
        direction,
        norm: spec.norm,
        rows: spec.rows,
        cols: spec.cols,
        dtypes,
        tensors,
        rows_per_group,
        has_weight_offset: spec.weight_offset != 0.0,
        cast_order: spec.cast_order,
        residual_placement: ResidualPlacement::default(),
        parts: 1,
        gate: spec.gate,
        groups: spec.groups,
        grad_reduction: GradReduction::default(),
        grad_store: GradStore::default(),
        quant: None,
    }
}

fn check_spec(spec: &NormSpec) -> Result<(), Error> {
    if !(spec.eps.is_finite() && spec.eps >= 0.0) {
        return Err(Error::InvalidEps { got: spec.eps });
    }
    if !spec.norm.takes_eps(spec.eps) {
        let rule = format!("of {} it must be {}, got {:e}", spec.norm.name(), spec.norm.eps_rule(), spec.eps);
        return Err(Error::InvalidArgument { arg: "eps", rule });
    }
    if !spec.weight_offset.is_finite() {
        return Err(Error::InvalidWeightOffset { got: spec.weight_offset });
    }
    if spec.cols == 0 {
        return Err(Error::EmptyRow);
    }
    if spec.groups == 0 || !spec.cols.is_multiple_of(spec.groups) {
        let rule = format!("their number must divide the {} columns of a row, got {}", spec.cols, spec.groups);
        return Err(Error::InvalidArgument { arg: "groups", rule });
    }
    if spec.groups > 1 && spec.residual_placement == ResidualPlacement::After {
        let rule = "no call combines groups of columns with a residual after the norm".into();
        return Err(Error::Unsupported { rule });
    }
    Ok(())
}

/// Checks the mix of dtypes of a call, or of a cast, in which y has another dtype than x.
fn check_mix(dtypes: DTypes, is_cast: bool) -> Result<(), Error> {
    if is_cast { dtypes.check_cast() } else { dtypes.check() }
}

/// Refuses a call that lost a tensor because its dtype was changed after the tensor was passed.
fn check_order(lost: Option<&'static str>) -> Result<(), Error> {
    let why = "its dtype was changed after it was passed: call f32_weight() and f32_residual() before";
    match lost {
        None => Ok(()),
        Some("x") => Err(Error::Unexpected { arg: "residual", why: ADDS_NOTHING }),
        Some(arg) => Err(Error::Unexpected { arg, why }),
    }
}

const ADDS_NOTHING: &str = "Forward::cast adds none: use Forward::new, whose x and y have one dtype";

/// A call without `x` normalizes the residual: it has `y`, and nothing that is added or overwritten.
fn check_cast<B: NormBackend + ?Sized, T: Element, W: Element, R: Element>(
    spec: &NormSpec,
    args: &Forward<'_, B, T, W, R>,
) -> Result<(), Error> {
    let unsupported = |rule: &str| Err(Error::Unsupported { rule: rule.into() });
    let unexpected = |arg, why| Err(Error::Unexpected { arg, why });
    match (&args.residual, &args.y, &args.residual_out, args.parts, next(args)) {
        (None, ..) => {
            Err(Error::Missing { arg: "x", why: "every forward call reads it: use Forward::new or Forward::cast" })
        }
        (Some(Source::Overwrite(_)), ..) => unexpected("residual", ADDS_NOTHING),
        (Some(Source::Read(_)), None, ..) => {
            Err(Error::Missing { arg: "y", why: "x has another dtype, so y cannot overwrite it: use Forward::cast" })
        }
        (Some(Source::Read(_)), Some(_), Some(_), ..) => {
            unexpected("residual_out", "Forward::cast has no sum to store")
        }
        (Some(Source::Read(_)), Some(_), None, _, Some(arg)) => unexpected(arg, "Forward::cast has no next norm"),
        (Some(Source::Read(_)), Some(_), None, Some(_), None) => {
            unsupported("no call adds parts and makes y of another dtype than x: use Forward::new with parts(..)")
        }
        (Some(Source::Read(_)), Some(_), None, None, None) => check_cast_pieces(spec, false),
    }
}

/// A call whose y has another dtype than its x adds no residual and has no gate before the norm.
pub(crate) fn check_cast_pieces(spec: &NormSpec, has_residual: bool) -> Result<(), Error> {
    let unsupported = |rule: &str| Err(Error::Unsupported { rule: rule.into() });
    match (spec.residual_placement, spec.gate) {
        (ResidualPlacement::After, _) => {
            unsupported("no call makes y of another dtype than x and adds a residual after the norm")
        }
        (ResidualPlacement::Before, _) if has_residual => {
            unsupported("no call adds a residual and makes y of another dtype than x: cast y after the call")
        }
        (ResidualPlacement::Before, Some(Gate { slot: Slot::Before, .. })) => {
            unsupported("no call has a gate before the norm and a y of another dtype than x")
        }
        (ResidualPlacement::Before, Some(Gate { slot: Slot::After, .. }) | None) => Ok(()),
    }
}

/// `y`, `residual` and `residual_out` fit `x`, with a residual before the norm.
fn check_targets<B: NormBackend + ?Sized, T: Element, W: Element, R: Element>(
    x: &Source<B::In<'_, T>, B::Out<'_, T>>,
    args: &Forward<'_, B, T, W, R>,
) -> Result<(), Error> {
    let unexpected = |arg, why| Err(Error::Unexpected { arg, why });
    if let Some(arg) = next(args) {
        return unexpected(arg, "the next norm needs NormSpec::residual_after()");
    }
    match (x, &args.y) {
        (Source::Read(_), None) if args.residual.is_some() => {
            let why = "x is only read, and the residual is added before the norm: pass y with Forward::new, or \
                NormSpec::residual_after()";
            return Err(Error::Missing { arg: "y", why });
        }
        (Source::Read(_), None) => {
            return Err(Error::Missing { arg: "y", why: "x is only read: use Forward::new or Forward::in_place" });
        }
        (Source::Overwrite(_), Some(_)) => return unexpected("y", "in place, the result overwrites x"),
        (Source::Read(_), Some(_)) | (Source::Overwrite(_), None) => {}
    }
    match (x, &args.residual) {
        (Source::Read(_), Some(Source::Overwrite(_))) => {
            let why = "it is overwritten and x is not: pass residual(..), or use Forward::in_place";
            return unexpected("residual", why);
        }
        (Source::Overwrite(_), Some(Source::Read(_))) => {
            return unexpected("residual", "in place it is overwritten too: pass residual_in_place(..)");
        }
        (Source::Read(_) | Source::Overwrite(_), None)
        | (Source::Read(_), Some(Source::Read(_)))
        | (Source::Overwrite(_), Some(Source::Overwrite(_))) => {}
    }
    match (&args.residual, &args.residual_out) {
        (None, Some(_)) => unexpected("residual_out", "there is no residual to add"),
        (Some(Source::Overwrite(_)), Some(_)) => unexpected("residual_out", "residual_in_place receives the sum"),
        (Some(Source::Read(_)) | None, None)
        | (Some(Source::Read(_)), Some(_))
        | (Some(Source::Overwrite(_)), None) => Ok(()),
    }
}

/// There is at least one part, and the sum overwrites nothing.
fn check_parts<B: NormBackend + ?Sized, T: Element, W: Element, R: Element>(
    spec: &NormSpec,
    args: &Forward<'_, B, T, W, R>,
) -> Result<(), Error> {
    let Some(parts) = args.parts else { return Ok(()) };
    let refuse = |rule: &str| Err(Error::InvalidArgument { arg: "x", rule: rule.into() });
    if parts.count == 0 {
        return refuse("the number of parts must be at least 1, got 0");
    }
    // A stride of at least 1 bounds their number by the number of elements. Without rows there are
    // no elements.
    if spec.rows > 0 && parts.count > 1 && parts.stride == 0 {
        return refuse("the stride of parts must be at least 1, got 0");
    }
    if spec.gate.is_some() && parts.count > 1 {
        return Err(Error::Unsupported { rule: "no call combines parts with a gate".into() });
    }
    if spec.cast_order.is_weight_first() && parts.count > 1 {
        let rule = "CastOrder::WeightFirst has one part of x: add the parts before the call".into();
        return Err(Error::Unsupported { rule });
    }
    match (&args.x, spec.residual_placement) {
        (Some(Source::Overwrite(_)), _) => refuse("a sum of parts cannot overwrite x: use Forward::new"),
        (Some(Source::Read(_)), ResidualPlacement::After) => {
            let rule = "no call combines parts with a residual after the norm".into();
            Err(Error::Unsupported { rule })
        }
        // A call without x has no parts.
        (Some(Source::Read(_)), ResidualPlacement::Before) | (None, _) => Ok(()),
    }
}

/// A gate comes with its activation, and a gated `x` and a gated result have no residual beside them.
fn check_gate(spec: &NormSpec, has_gate: bool, has_residual: bool) -> Result<(), Error> {
    let unsupported = |rule: &str| Err(Error::Unsupported { rule: rule.into() });
    match (spec.gate, has_gate, spec.residual_placement) {
        (None, true, _) => {
            let why = "the norm has no gate: use NormSpec::gate_after(..) or NormSpec::gate_before(..)";
            Err(Error::Unexpected { arg: "gate", why })
        }
        (Some(_), false, _) => {
            Err(Error::Missing { arg: "gate", why: "NormSpec::gate multiplies by its activation: pass gate(..)" })
        }
        (Some(_), true, ResidualPlacement::After) => {
            unsupported("no call combines a gate with a residual after the norm")
        }
        (Some(Gate { slot: Slot::Before, .. }), true, ResidualPlacement::Before) if has_residual => {
            unsupported("no call adds a residual to a gated x: add it before the call, or use NormSpec::gate_after(..)")
        }
        (None, false, _) | (Some(_), true, ResidualPlacement::Before) => Ok(()),
    }
}

/// A weight before the norm is there, and nothing else makes what is normalized.
pub(crate) fn check_weight_first(
    spec: &NormSpec,
    has_weight: bool,
    has_residual: bool,
    is_cast: bool,
) -> Result<(), Error> {
    if !spec.cast_order.is_weight_first() {
        return Ok(());
    }
    let unsupported = |rule: &str| Err(Error::Unsupported { rule: rule.into() });
    if is_cast {
        return unsupported("no call combines CastOrder::WeightFirst with a y of another dtype than x");
    }
    match (spec.residual_placement, spec.gate) {
        (ResidualPlacement::After, _) => {
            unsupported("no call combines CastOrder::WeightFirst with a residual after the norm")
        }
        (ResidualPlacement::Before, _) if has_residual => unsupported(
            "no call adds a residual to x before CastOrder::WeightFirst multiplies it: add it before the call",
        ),
        (ResidualPlacement::Before, Some(Gate { slot: Slot::Before, .. })) => unsupported(
            "no call combines CastOrder::WeightFirst with a gate before the norm: use NormSpec::gate_after(..)",
        ),
        (ResidualPlacement::Before, None | Some(Gate { slot: Slot::After, .. })) if has_weight => Ok(()),
        (ResidualPlacement::Before, None | Some(Gate { slot: Slot::After, .. })) => {
            let why = "CastOrder::WeightFirst multiplies x with it before the norm: pass weight(..)";
            Err(Error::Missing { arg: "weight", why })
        }
    }
}

/// `residual_out` or the residual receives the sum, and a next norm has `y`.
fn check_targets_after<B: NormBackend + ?Sized, T: Element, W: Element, R: Element>(
    x: &Source<B::In<'_, T>, B::Out<'_, T>>,
    args: &Forward<'_, B, T, W, R>,
) -> Result<(), Error> {
    let unexpected = |arg, why| Err(Error::Unexpected { arg, why });
    match (x, &args.y, next(args)) {
        (Source::Overwrite(_), ..) => {
            let why =
                "with NormSpec::residual_after it is not overwritten: use Forward::new or Forward::added_to_residual";
            return unexpected("x", why);
        }
        (Source::Read(_), None, Some(arg)) => return unexpected(arg, "the next norm writes y: use Forward::new"),
        (Source::Read(_), Some(_), _) | (Source::Read(_), None, None) => {}
    }
    let missing = |arg, why| Err(Error::Missing { arg, why });
    match (&args.residual, &args.residual_out) {
        (None, _) => missing("residual", "NormSpec::residual_after adds the norm to it: pass residual(..)"),
        (Some(Source::Read(_)), None) => {
            missing("residual_out", "the residual is only read: pass residual_out(..), or residual_in_place(..)")
        }
        (Some(Source::Overwrite(_)), Some(_)) => unexpected("residual_out", "residual_in_place receives the sum"),
        (Some(Source::Read(_)), Some(_)) | (Some(Source::Overwrite(_)), None) => Ok(()),
    }
}

/// The name of the first tensor of a next norm that was passed.
fn next<B: NormBackend + ?Sized, T: Element, W: Element, R: Element>(
    args: &Forward<'_, B, T, W, R>,
) -> Option<&'static str> {
    let of_weight = args.next_weight.as_ref().map(|_| "next_weight").or(args.next_bias.as_ref().map(|_| "next_bias"));
    of_weight.or(args.next_mean.as_ref().map(|_| "next_mean")).or(args.next_rstd.as_ref().map(|_| "next_rstd"))
}

/// How the gradients are stored: weight and bias the same way.
fn grad_store<B: NormBackend + ?Sized, T: Element, W: Element, R: Element>(
    args: &Backward<'_, B, T, W, R>,
) -> Result<GradStore, Error> {
    let rounded = args.dweight.as_ref().map(|_| "dweight").or(args.dbias.as_ref().map(|_| "dbias"));
    let is_sum = args.dweight_sum.is_some() || args.dbias_sum.is_some();
    match (rounded, is_sum, args.accumulate) {
        (Some(arg), true, _) => {
            Err(Error::Unexpected { arg, why: "a call has either dweight and dbias, or dweight_sum and dbias_sum" })
        }
        (_, false, true) => {
            let rule = "it adds to f32 sums only: pass dweight_sum(..) or dbias_sum(..)".into();
            Err(Error::InvalidArgument { arg: "accumulate", rule })
        }
        (_, false, false) => Ok(GradStore::Rounded),
        (None, true, false) => Ok(GradStore::Sum),
        (None, true, true) => Ok(GradStore::Accumulated),
    }
}

/// Refuses gradients of the residual if it was added after the norm, as its gradient is `dy`, and
/// what only gates have.
fn check_gradients<B: NormBackend + ?Sized, T: Element, W: Element, R: Element>(
    spec: &NormSpec,
    args: &Backward<'_, B, T, W, R>,
) -> Result<(), Error> {
    let why = "the residual is added after the norm, so its gradient is dy; for the next norm's backward pass, use a \
        NormSpec without residual_after()";
    if args.dx.is_none() && args.dresidual.is_none() {
        return Err(Error::Missing { arg: "dx", why: "every backward call writes it" });
    }
    match (spec.residual_placement, &args.dresidual_out, &args.dresidual) {
        (ResidualPlacement::After, Some(_), _) => Err(Error::Unexpected { arg: "dresidual_out", why }),
        (ResidualPlacement::After, None, Some(_)) => Err(Error::Unexpected { arg: "dresidual", why }),
        (ResidualPlacement::After, None, None) | (ResidualPlacement::Before, ..) => check_gate_gradients(spec, args),
    }
}

/// `bias` and `dgate` come with a gate that needs them, and the `x` of a gate before the norm is
/// the activations'.
fn check_gate_gradients<B: NormBackend + ?Sized, T: Element, W: Element, R: Element>(
    spec: &NormSpec,
    args: &Backward<'_, B, T, W, R>,
) -> Result<(), Error> {
    let slot = spec.gate.map(|gate| gate.slot);
    if args.bias.is_some() && slot != Some(Slot::After) {
        return Err(Error::Unexpected { arg: "bias", why: "only a gate after the norm needs it for its gradient" });
    }
    if args.dgate.is_some() && slot.is_none() {
        return Err(Error::Unexpected { arg: "dgate", why: "the norm has no gate" });
    }
    let DTypes { activation, residual, .. } = args.dtypes;
    let of_x = match (slot, spec.cast_order.is_weight_first()) {
        (Some(Slot::Before), _) => Some("a gate before the norm"),
        (None | Some(Slot::After), true) => Some("CastOrder::WeightFirst"),
        (None | Some(Slot::After), false) => None,
    };
    if let Some(of_x) = of_x.filter(|_| activation != residual) {
        let rule = format!("with {of_x} it has the activations' dtype, {activation}, got {residual}");
        return Err(Error::InvalidArgument { arg: "x", rule });
    }
    Ok(())
}

fn forbid_mean(spec: &NormSpec, arg: &'static str, has_mean: bool) -> Result<(), Error> {
    let unexpected = |why| if has_mean { Err(Error::Unexpected { arg, why }) } else { Ok(()) };
    match spec.norm {
        Norm::Rms => unexpected("rms norm does not remove the mean"),
        Norm::L2 | Norm::L2Clamped => unexpected("l2 norm does not remove the mean"),
        Norm::Layer => Ok(()),
    }
}
