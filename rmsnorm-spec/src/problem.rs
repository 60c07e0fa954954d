//! Validation: all of it, once, for every backend, before anything runs.
//!
//! A [`Checked`] can only be built here, so holding one proves what [`Problem`] documents. Backends cite that proof in
//! their SAFETY comments instead of checking again.

use crate::{
    Backward, CastOrder, DType, Element, Error, Forward, ForwardInPlace, GradReduction, Norm, NormBackend, NormSpec,
    Rows,
};

/// Where a view lies in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Identifies the allocation; views of different allocations never overlap. 0 where addresses are global.
    pub allocation: u64,
    /// Byte address, or offset within the allocation, of the first element.
    pub start: u64,
    /// Number of elements.
    pub len: usize,
}

/// The direction of a call and its form.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Stage {
    /// [`NormBackend::forward`].
    Forward,
    /// [`NormBackend::forward_in_place`].
    ForwardInPlace,
    /// [`NormBackend::backward`].
    Backward,
}

impl Stage {
    /// Every stage.
    pub const ALL: [Stage; 3] = [Stage::Forward, Stage::ForwardInPlace, Stage::Backward];

    /// The name used in reports and bench ids: `forward`, `forward_in_place` or `backward`.
    pub const fn name(self) -> &'static str {
        match self {
            Stage::Forward => "forward",
            Stage::ForwardInPlace => "forward_in_place",
            Stage::Backward => "backward",
        }
    }
}

/// Which optional tensors a call has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Present {
    /// `weight`
    pub weight: bool,
    /// `bias`
    pub bias: bool,
    /// `residual`
    pub residual: bool,
    /// `residual_out`; in the in-place form the same as `residual`
    pub residual_out: bool,
    /// `mean`
    pub mean: bool,
    /// `rstd`
    pub rstd: bool,
    /// `dresidual_out`
    pub dresidual_out: bool,
    /// `dweight`
    pub dweight: bool,
    /// `dbias`
    pub dbias: bool,
    /// `workspace`
    pub workspace: bool,
}

impl Present {
    /// No optional tensor; the default, for constants.
    pub const NONE: Present = Present {
        weight: false,
        bias: false,
        residual: false,
        residual_out: false,
        mean: false,
        rstd: false,
        dresidual_out: false,
        dweight: false,
        dbias: false,
        workspace: false,
    };
}

/// A validated call without its pointers and floats: what a plan is made from, so it can be compared and hashed.
///
/// A `Problem` inside a [`Checked`] guarantees:
/// - `cols >= 1`; `rows * cols` elements of every dtype fit `isize::MAX` bytes, strides included;
/// - every matrix has a row stride of at least `cols` and reaches from row 0 to the end of the last row;
/// - `weight`, `bias`, `dweight`, `dbias` have `cols` elements, `mean` and `rstd` have `rows`;
/// - `mean` is present exactly where it may be (forward) or must be (backward); `rstd` is present in backward;
/// - weight and residual dtypes are each the activations' dtype or f32;
/// - `workspace`, if present, has at least [`NormBackend::workspace_len`] elements;
/// - no output overlaps any other tensor of the call;
/// - `eps` is finite and not negative, `weight_offset` finite.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Problem {
    /// The direction and form.
    pub stage: Stage,
    /// The kind of norm.
    pub norm: Norm,
    /// Rows of every matrix.
    pub rows: usize,
    /// Elements of every row.
    pub cols: usize,
    /// The dtype `T` of x (forward), y, dy and dx.
    pub activation: DType,
    /// The dtype `W` of weight, bias, dweight and dbias.
    pub weight: DType,
    /// The dtype `R` of residual, residual_out, dresidual_out and backward's x.
    pub residual: DType,
    /// Whether a non-zero `weight_offset` is added.
    pub has_weight_offset: bool,
    /// Where `x_hat` is rounded.
    pub cast_order: CastOrder,
    /// How weight gradients are summed; the default in forward.
    pub grad_reduction: GradReduction,
    /// Which optional tensors there are.
    pub present: Present,
}

impl Problem {
    /// A problem whose tensors all have one dtype, with no weight offset, and the default cast order and reduction.
    pub fn uniform(stage: Stage, norm: Norm, rows: usize, cols: usize, dtype: DType, present: Present) -> Self {
        Problem {
            stage,
            norm,
            rows,
            cols,
            activation: dtype,
            weight: dtype,
            residual: dtype,
            has_weight_offset: false,
            cast_order: CastOrder::default(),
            grad_reduction: GradReduction::default(),
            present,
        }
    }
}

/// Arguments that have passed validation.
pub struct Checked<A> {
    spec: NormSpec,
    args: A,
    problem: Problem,
}

impl<A> Checked<A> {
    /// What is computed.
    pub const fn spec(&self) -> &NormSpec {
        &self.spec
    }

    /// The call without its pointers.
    pub const fn problem(&self) -> &Problem {
        &self.problem
    }

    /// The arguments. Every [`Rows::row_stride`] in them is set.
    pub fn into_args(self) -> A {
        self.args
    }
}

impl<V> Rows<V> {
    /// The distance between rows, in elements.
    pub fn stride(&self, cols: usize) -> usize {
        self.row_stride.unwrap_or(cols)
    }

    fn resolved(self, cols: usize) -> Self {
        Rows { row_stride: Some(self.stride(cols)), ..self }
    }
}

impl<'a, B: NormBackend + ?Sized, T: Element, W: Element, R: Element> Checked<Forward<'a, B, T, W, R>> {
    /// Validates a forward call.
    ///
    /// For backends whose calls have another form than the trait's, such as recording into an encoder.
    ///
    /// # Errors
    /// The first rule of [`Problem`] that does not hold, as the variant of [`Error`] that names the argument.
    pub fn forward(spec: NormSpec, args: Forward<'a, B, T, W, R>) -> Result<Self, Error> {
        let mut tensors = Tensors::new(&spec)?;
        check_dtypes::<T, W, R>()?;
        if args.residual.is_none() && args.residual_out.is_some() {
            return Err(Error::Unexpected { arg: "residual_out", why: "there is no residual to add" });
        }
        forbid_mean_for_rms(&spec, args.mean.is_some())?;

        tensors.input_rows::<B, T>("x", Some(&args.x))?;
        tensors.input_rows::<B, R>("residual", args.residual.as_ref())?;
        tensors.input::<B, W>("weight", spec.cols, args.weight.as_ref())?;
        tensors.input::<B, W>("bias", spec.cols, args.bias.as_ref())?;
        tensors.output_rows::<B, T>("y", Some(&args.y))?;
        tensors.output_rows::<B, R>("residual_out", args.residual_out.as_ref())?;
        tensors.output::<B, f32>("mean", spec.rows, args.mean.as_ref())?;
        tensors.output::<B, f32>("rstd", spec.rows, args.rstd.as_ref())?;
        tensors.check_overlap()?;

        let present = Present {
            weight: args.weight.is_some(),
            bias: args.bias.is_some(),
            residual: args.residual.is_some(),
            residual_out: args.residual_out.is_some(),
            mean: args.mean.is_some(),
            rstd: args.rstd.is_some(),
            ..Present::default()
        };
        let problem = problem::<T, W, R>(Stage::Forward, &spec, GradReduction::default(), present);
        let cols = spec.cols;
        let args = Forward {
            x: args.x.resolved(cols),
            y: args.y.resolved(cols),
            residual: args.residual.map(|rows| rows.resolved(cols)),
            residual_out: args.residual_out.map(|rows| rows.resolved(cols)),
            ..args
        };
        Ok(Checked { spec, args, problem })
    }
}

impl<'a, B: NormBackend + ?Sized, T: Element, W: Element, R: Element> Checked<ForwardInPlace<'a, B, T, W, R>> {
    /// Validates an in-place forward call.
    ///
    /// For backends whose calls have another form than the trait's, such as recording into an encoder.
    ///
    /// # Errors
    /// As [`Checked::forward`].
    pub fn forward_in_place(spec: NormSpec, args: ForwardInPlace<'a, B, T, W, R>) -> Result<Self, Error> {
        let mut tensors = Tensors::new(&spec)?;
        check_dtypes::<T, W, R>()?;
        forbid_mean_for_rms(&spec, args.mean.is_some())?;

        tensors.output_rows::<B, T>("x", Some(&args.x))?;
        tensors.output_rows::<B, R>("residual", args.residual.as_ref())?;
        tensors.input::<B, W>("weight", spec.cols, args.weight.as_ref())?;
        tensors.input::<B, W>("bias", spec.cols, args.bias.as_ref())?;
        tensors.output::<B, f32>("mean", spec.rows, args.mean.as_ref())?;
        tensors.output::<B, f32>("rstd", spec.rows, args.rstd.as_ref())?;
        tensors.check_overlap()?;

        let present = Present {
            weight: args.weight.is_some(),
            bias: args.bias.is_some(),
            residual: args.residual.is_some(),
            residual_out: args.residual.is_some(),
            mean: args.mean.is_some(),
            rstd: args.rstd.is_some(),
            ..Present::default()
        };
        let problem = problem::<T, W, R>(Stage::ForwardInPlace, &spec, GradReduction::default(), present);
        let cols = spec.cols;
        let args = ForwardInPlace {
            x: args.x.resolved(cols),
            residual: args.residual.map(|rows| rows.resolved(cols)),
            ..args
        };
        Ok(Checked { spec, args, problem })
    }
}

impl<'a, B: NormBackend + ?Sized, T: Element, W: Element, R: Element> Checked<Backward<'a, B, T, W, R>> {
    /// Validates a backward call; the backend says how much workspace it needs.
    ///
    /// For backends whose calls have another form than the trait's, such as recording into an encoder.
    ///
    /// # Errors
    /// As [`Checked::forward`].
    pub fn backward(backend: &B, spec: NormSpec, args: Backward<'a, B, T, W, R>) -> Result<Self, Error> {
        let mut tensors = Tensors::new(&spec)?;
        check_dtypes::<T, W, R>()?;
        if args.rstd.is_none() {
            return Err(Error::Missing { arg: "rstd", why: "the backward pass needs the forward pass's rstd" });
        }
        forbid_mean_for_rms(&spec, args.mean.is_some())?;
        if spec.norm == Norm::Layer && args.mean.is_none() {
            return Err(Error::Missing {
                arg: "mean",
                why: "layer norm's backward pass needs the forward pass's mean",
            });
        }
        if args.grad_reduction == (GradReduction::Locks { groups: 0 }) {
            return Err(Error::Unsupported { rule: "GradReduction::Locks needs at least 1 group, got 0".into() });
        }

        tensors.input_rows::<B, T>("dy", Some(&args.dy))?;
        tensors.input_rows::<B, R>("x", Some(&args.x))?;
        tensors.input::<B, W>("weight", spec.cols, args.weight.as_ref())?;
        tensors.input::<B, f32>("mean", spec.rows, args.mean.as_ref())?;
        tensors.input::<B, f32>("rstd", spec.rows, args.rstd.as_ref())?;
        tensors.input_rows::<B, R>("dresidual_out", args.dresidual_out.as_ref())?;
        tensors.output_rows::<B, T>("dx", Some(&args.dx))?;
        tensors.output::<B, W>("dweight", spec.cols, args.dweight.as_ref())?;
        tensors.output::<B, W>("dbias", spec.cols, args.dbias.as_ref())?;
        if let Some(workspace) = &args.workspace {
            tensors.push("workspace", DType::F32, 1, Some(0), B::out_span(workspace), true);
        }
        tensors.check_overlap()?;

        let present = Present {
            weight: args.weight.is_some(),
            mean: args.mean.is_some(),
            rstd: true,
            dresidual_out: args.dresidual_out.is_some(),
            dweight: args.dweight.is_some(),
            dbias: args.dbias.is_some(),
            workspace: args.workspace.is_some(),
            ..Present::default()
        };
        let problem = problem::<T, W, R>(Stage::Backward, &spec, args.grad_reduction, present);
        if let Some(workspace) = &args.workspace {
            let (min, got) = (backend.workspace_len(&problem), B::out_span(workspace).len);
            if got < min {
                return Err(Error::Length { arg: "workspace", min, max: usize::MAX, got });
            }
        }
        let cols = spec.cols;
        let args = Backward {
            dy: args.dy.resolved(cols),
            x: args.x.resolved(cols),
            dx: args.dx.resolved(cols),
            dresidual_out: args.dresidual_out.map(|rows| rows.resolved(cols)),
            ..args
        };
        Ok(Checked { spec, args, problem })
    }
}

fn problem<T: Element, W: Element, R: Element>(
    stage: Stage,
    spec: &NormSpec,
    grad_reduction: GradReduction,
    present: Present,
) -> Problem {
    Problem {
        stage,
        norm: spec.norm,
        rows: spec.rows,
        cols: spec.cols,
        activation: T::DTYPE,
        weight: W::DTYPE,
        residual: R::DTYPE,
        has_weight_offset: spec.weight_offset != 0.0,
        cast_order: spec.cast_order,
        grad_reduction,
        present,
    }
}

fn check_dtypes<T: Element, W: Element, R: Element>() -> Result<(), Error> {
    for (arg, dtype) in [("weight and bias", W::DTYPE), ("the residual stream", R::DTYPE)] {
        if dtype != T::DTYPE && dtype != DType::F32 {
            let rule = format!("{arg} must be f32 or of the activations' dtype {}, got {dtype}", T::DTYPE);
            return Err(Error::Unsupported { rule });
        }
    }
    Ok(())
}

fn forbid_mean_for_rms(spec: &NormSpec, has_mean: bool) -> Result<(), Error> {
    if has_mean && spec.norm == Norm::Rms {
        return Err(Error::Unexpected { arg: "mean", why: "rms norm does not remove the mean" });
    }
    Ok(())
}

/// One tensor of a call, reduced to what the checks need.
#[derive(Clone, Copy)]
struct Tensor {
    name: &'static str,
    dtype: DType,
    cols: usize,
    /// `None` for a dense vector.
    row_stride: Option<usize>,
    span: Span,
    is_output: bool,
}

/// The tensors of a call: a fixed array, because a call must not allocate.
struct Tensors {
    rows: usize,
    cols: usize,
    list: [Option<Tensor>; Tensors::MOST],
    len: usize,
}

impl Tensors {
    /// Backward's count: dy, x, weight, mean, rstd, dresidual_out, dx, dweight, dbias, workspace.
    const MOST: usize = 10;

    fn new(spec: &NormSpec) -> Result<Self, Error> {
        if !(spec.eps.is_finite() && spec.eps >= 0.0) {
            return Err(Error::InvalidEps { got: spec.eps });
        }
        if !spec.weight_offset.is_finite() {
            return Err(Error::InvalidWeightOffset { got: spec.weight_offset });
        }
        if spec.cols == 0 {
            return Err(Error::EmptyRow);
        }
        Ok(Tensors { rows: spec.rows, cols: spec.cols, list: [None; Tensors::MOST], len: 0 })
    }

    fn push(
        &mut self,
        name: &'static str,
        dtype: DType,
        cols: usize,
        row_stride: Option<usize>,
        span: Span,
        is_output: bool,
    ) {
        debug_assert!(self.len < Tensors::MOST, "{name} would not be checked for overlap: raise Tensors::MOST");
        if let Some(slot) = self.list.get_mut(self.len) {
            *slot = Some(Tensor { name, dtype, cols, row_stride, span, is_output });
            self.len += 1;
        }
    }

    fn input<B: NormBackend + ?Sized, E: Element>(
        &mut self,
        name: &'static str,
        expected: usize,
        view: Option<&B::In<'_, E>>,
    ) -> Result<(), Error> {
        view.map_or(Ok(()), |view| self.vector(name, E::DTYPE, expected, B::in_span(view), false))
    }

    fn output<B: NormBackend + ?Sized, E: Element>(
        &mut self,
        name: &'static str,
        expected: usize,
        view: Option<&B::Out<'_, E>>,
    ) -> Result<(), Error> {
        view.map_or(Ok(()), |view| self.vector(name, E::DTYPE, expected, B::out_span(view), true))
    }

    fn input_rows<B: NormBackend + ?Sized, E: Element>(
        &mut self,
        name: &'static str,
        rows: Option<&Rows<B::In<'_, E>>>,
    ) -> Result<(), Error> {
        rows.map_or(Ok(()), |r| self.matrix(name, E::DTYPE, r.stride(self.cols), B::in_span(&r.view), false))
    }

    fn output_rows<B: NormBackend + ?Sized, E: Element>(
        &mut self,
        name: &'static str,
        rows: Option<&Rows<B::Out<'_, E>>>,
    ) -> Result<(), Error> {
        rows.map_or(Ok(()), |r| self.matrix(name, E::DTYPE, r.stride(self.cols), B::out_span(&r.view), true))
    }

    fn vector(
        &mut self,
        name: &'static str,
        dtype: DType,
        expected: usize,
        span: Span,
        is_output: bool,
    ) -> Result<(), Error> {
        if span.len != expected {
            return Err(Error::Length { arg: name, min: expected, max: expected, got: span.len });
        }
        self.push(name, dtype, expected, None, span, is_output);
        Ok(())
    }

    fn matrix(
        &mut self,
        name: &'static str,
        dtype: DType,
        row_stride: usize,
        span: Span,
        is_output: bool,
    ) -> Result<(), Error> {
        let (rows, cols) = (self.rows, self.cols);
        if row_stride < cols {
            return Err(Error::Stride { arg: name, cols, got: row_stride });
        }
        let too_large = Error::TooLarge { arg: name, rows, row_stride, dtype };
        // A byte size above isize::MAX cannot be a Rust slice nor be indexed by any backend.
        let Some(max) = rows.checked_mul(row_stride).filter(|&max| max <= isize::MAX as usize / dtype.size()) else {
            return Err(too_large);
        };
        // The last row need not be padded to the stride.
        let min = if rows == 0 { 0 } else { max - row_stride + cols };
        if !(min..=max).contains(&span.len) {
            return Err(Error::Length { arg: name, min, max, got: span.len });
        }
        self.push(name, dtype, cols, Some(row_stride), span, is_output);
        Ok(())
    }

    fn check_overlap(&self) -> Result<(), Error> {
        let tensors = || self.list.iter().flatten();
        for (i, output) in tensors().enumerate().filter(|(_, tensor)| tensor.is_output) {
            for (j, other) in tensors().enumerate() {
                // Two outputs meet once, in the order of their names in the argument struct.
                let seen = i == j || (other.is_output && j < i);
                if !seen && output.overlaps(other) {
                    return Err(Error::Overlap { output: output.name, other: other.name });
                }
            }
        }
        Ok(())
    }
}

impl Tensor {
    /// Whether the two share an element. Rows that interleave (slices of one fused buffer) do not.
    fn overlaps(&self, other: &Tensor) -> bool {
        let (a, b) = (self.bytes(), other.bytes());
        // Where the later one starts is before the earlier end: never so for a view without elements.
        let ranges_meet = self.span.allocation == other.span.allocation && a.0.max(b.0) < a.1.min(b.1);
        ranges_meet && !self.interleaves(other)
    }

    /// First byte and the byte after the last.
    fn bytes(&self) -> (u128, u128) {
        let start = u128::from(self.span.start);
        (start, start + self.span.len as u128 * self.dtype.size() as u128)
    }

    /// Two matrices of one stride in bytes, whose rows fall into disjoint columns of it.
    fn interleaves(&self, other: &Tensor) -> bool {
        let (Some(a), Some(b)) = (self.row_stride, other.row_stride) else { return false };
        let stride = a as u128 * self.dtype.size() as u128;
        if stride == 0 || stride != b as u128 * other.dtype.size() as u128 {
            return false;
        }
        let (a_len, b_len) =
            (self.cols as u128 * self.dtype.size() as u128, other.cols as u128 * other.dtype.size() as u128);
        let (a, b) = (u128::from(self.span.start) % stride, u128::from(other.span.start) % stride);
        let distance = (b + stride - a) % stride;
        distance >= a_len && distance + b_len <= stride
    }
}

#[cfg(test)]
mod tests;
