//! Where the tensors of a call lie: their sizes are right, and no output shares memory with another tensor.

use crate::args::{SpanVisitor, View, Views};
use crate::{Access, DType, Direction, Error, NormBackend, NormSpec, Span, Tensor, TensorSet, TensorShape};

/// One tensor of a call, reduced to what the checks need.
#[derive(Clone, Copy)]
struct Placed {
    arg: &'static str,
    dtype: DType,
    cols: usize,
    /// `None` for a dense vector.
    row_stride: Option<usize>,
    span: Span,
}

/// The tensors of a call, each at its place in [`Tensor::ALL`]: a fixed array, because a call must not allocate.
pub(super) struct Layout {
    direction: Direction,
    rows: usize,
    cols: usize,
    tensors: TensorSet,
    outputs: TensorSet,
    list: [Option<Placed>; Tensor::COUNT],
}

impl Layout {
    /// Which tensors these arguments have, if their sizes are right and no output overlaps another tensor.
    pub(super) fn check<'a, B: NormBackend + ?Sized>(
        spec: &NormSpec,
        direction: Direction,
        args: &impl Views<'a, B>,
    ) -> Result<TensorSet, Error> {
        let (tensors, outputs) = (TensorSet::NONE, TensorSet::NONE);
        let list = [None; Tensor::COUNT];
        let mut layout = Layout { direction, rows: spec.rows, cols: spec.cols, tensors, outputs, list };
        args.spans(&mut layout)?;
        layout.check_overlap()?;
        Ok(layout.tensors)
    }

    /// The elements that the tensor may have, fewest and most.
    fn len(&self, tensor: Tensor, view: &View) -> Result<(usize, usize), Error> {
        Ok(match tensor.shape() {
            TensorShape::Cols => (self.cols, self.cols),
            TensorShape::Rows => (self.rows, self.rows),
            // The backend says how many it needs, when the problem is known.
            TensorShape::Workspace => (0, usize::MAX),
            TensorShape::Matrix => self.matrix_len(view)?,
        })
    }

    fn matrix_len(&self, view: &View) -> Result<(usize, usize), Error> {
        let (rows, cols, row_stride) = (self.rows, self.cols, self.stride(view));
        if row_stride < cols {
            return Err(Error::Stride { arg: view.arg, cols, got: row_stride });
        }
        let too_large = Error::TooLarge { arg: view.arg, rows, row_stride, dtype: view.dtype };
        // A byte size above isize::MAX cannot be a Rust slice nor be indexed by any backend.
        let Some(max) = rows.checked_mul(row_stride).filter(|&max| max <= isize::MAX as usize / view.dtype.size())
        else {
            return Err(too_large);
        };
        // The last row need not be padded to the stride.
        let min = if rows == 0 { 0 } else { max - row_stride + cols };
        Ok((min, max))
    }

    fn stride(&self, view: &View) -> usize {
        view.row_stride.unwrap_or(self.cols)
    }

    fn check_overlap(&self) -> Result<(), Error> {
        let placed =
            |set: TensorSet| set.iter().filter_map(|tensor| Some((tensor, self.list[tensor as usize].as_ref()?)));
        let mut seen = TensorSet::NONE;
        for (tensor, output) in placed(self.outputs) {
            // Each pair of outputs is compared once.
            seen = seen.with(tensor);
            for (_, other) in placed(self.tensors.difference(seen)) {
                if output.overlaps(other) {
                    return Err(Error::Overlap { output: output.arg, other: other.arg });
                }
            }
        }
        Ok(())
    }
}

impl SpanVisitor for Layout {
    fn visit(&mut self, tensor: Tensor, view: View) -> Result<(), Error> {
        let (min, max) = self.len(tensor, &view)?;
        let View { arg, dtype, span, .. } = view;
        if !(min..=max).contains(&span.len) {
            return Err(Error::Length { arg, min, max, got: span.len });
        }
        let (cols, row_stride) = match tensor.shape() {
            TensorShape::Matrix => (self.cols, Some(self.stride(&view))),
            TensorShape::Cols | TensorShape::Rows | TensorShape::Workspace => (span.len, None),
        };
        self.tensors = self.tensors.with(tensor);
        let is_output = tensor.access(self.direction) == Some(Access::Write);
        self.outputs = self.outputs.set(tensor, is_output);
        self.list[tensor as usize] = Some(Placed { arg, dtype, cols, row_stride, span });
        Ok(())
    }
}

impl Placed {
    /// Whether the two share an element. Rows that interleave (slices of one fused buffer) do not.
    fn overlaps(&self, other: &Placed) -> bool {
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
    fn interleaves(&self, other: &Placed) -> bool {
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
