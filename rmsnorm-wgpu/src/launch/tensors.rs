//! Views to positions in buffers. Checks the rules of storage buffers here, with clearer messages
//! than wgpu's.

use rmsnorm_spec::quant::ScaleKind;
use rmsnorm_spec::{AnyElement, Error, Problem, RowLayout, Rows, Storage, Tensor, TensorShape};
use wgpu::{Buffer, BufferUsages};

use crate::error::invalid;
use crate::plan::Placed;
use crate::view::WgpuSlice;

/// The part of a tensor that a dispatch on some of the rows uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shape {
    /// A matrix with this layout: the rows of the dispatch.
    Rows(RowLayout),
    /// A vector with one element per column: all of it.
    Columns,
    /// A vector with this many elements per row, or elements of a copy: the ones of the dispatch's
    /// rows.
    PerRow(usize),
    /// All of it: transposed codes (whose rows are columns), scales, single numbers, the workspace.
    Whole,
}

/// A tensor of a call, within its buffer.
#[derive(Clone, Copy, Debug)]
pub(super) struct View<'a> {
    tensor: Tensor,
    /// The argument's name in this call.
    pub(super) name: &'static str,
    pub(super) buffer: &'a Buffer,
    /// Bytes; a multiple of the element's size.
    pub(super) offset: u64,
    /// Elements.
    pub(super) len: u64,
    pub(super) storage: Storage,
    pub(super) shape: Shape,
    /// Row stride of transposed codes, in elements; 0 for other tensors.
    pub(super) row_stride: u64,
    is_written: bool,
}

/// The tensors of a call.
#[derive(Debug)]
pub(crate) struct Tensors<'a> {
    cols: usize,
    /// `None` for a copy.
    problem: Option<Problem>,
    views: [Option<View<'a>>; Tensor::COUNT],
}

impl<'a> Tensors<'a> {
    /// An empty set, for a call with this problem.
    pub(crate) fn new(problem: Problem) -> Self {
        Tensors { cols: problem.cols, problem: Some(problem), views: [None; Tensor::COUNT] }
    }

    /// The two tensors of a copy.
    ///
    /// # Errors
    /// `InvalidArgument`, with the name of the tensor, if it cannot be bound.
    pub(super) fn of_copy<T: AnyElement>(from: WgpuSlice<'a, T>, to: WgpuSlice<'a, T>) -> Result<Self, Error> {
        let mut tensors = Tensors { cols: from.len().min(to.len()), problem: None, views: [None; Tensor::COUNT] };
        tensors.add(Tensor::X, from.into(), false)?;
        tensors.add(Tensor::Y, to.into(), true)?;
        Ok(tensors)
    }

    pub(super) fn cols(&self) -> u64 {
        self.cols as u64
    }

    /// Rows of a group, if rows are in groups.
    pub(super) fn rows_per_group(&self) -> Option<usize> {
        self.problem.and_then(|problem| problem.rows_per_group)
    }

    pub(super) fn get(&self, tensor: Tensor) -> Option<&View<'a>> {
        self.views.get(tensor as usize)?.as_ref()
    }

    /// Checks that a tensor can be zeroed by a copy command.
    ///
    /// # Errors
    /// `InvalidArgument` if its buffer lacks the usage `COPY_DST`.
    pub(super) fn check_clearable(&self, tensor: Tensor) -> Result<(), Error> {
        let Some(view) = self.get(tensor) else { return Ok(()) };
        let usage = view.buffer.usage();
        if usage.contains(BufferUsages::COPY_DST) {
            return Ok(());
        }
        let name = view.name;
        let rule = format!("GradReduction::Atomics needs a buffer with the usage COPY_DST, got {usage:?}");
        Err(invalid(name, rule))
    }

    /// The positions of matrices, weight and bias, which determine the plan's accesses.
    pub(super) fn inputs_and_matrices(&self) -> impl Iterator<Item = Placed> {
        self.all().filter(|view| !view.is_gradient()).filter_map(|view| match view.shape {
            Shape::Rows(layout) => Some(view.of_rows(&layout, self.rows_per_group())),
            Shape::Columns => Some(view.of_vector()),
            Shape::PerRow(_) | Shape::Whole => None,
        })
    }

    /// The position of scales that the call computes.
    pub(super) fn scales(&self) -> Option<Placed> {
        self.get(Tensor::Scales).map(View::of_vector)
    }

    /// The positions of codes and transposed codes, if the call has both.
    pub(super) fn transposed(&self) -> [Option<Placed>; 2] {
        let (Some(codes), Some(codes_t)) = (self.get(Tensor::Codes), self.get(Tensor::CodesT)) else {
            return [None; 2];
        };
        let codes = match codes.shape {
            Shape::Rows(layout) => codes.of_rows(&layout, self.rows_per_group()),
            Shape::Columns | Shape::PerRow(_) | Shape::Whole => codes.of_vector(),
        };
        [Some(codes), Some(Placed { row_stride: codes_t.row_stride, ..codes_t.of_vector() })]
    }

    /// If the call computes the tensor's scale, binds it as the given scale of the pass that writes
    /// codes.
    fn give_found_scale(&mut self) {
        let is_found =
            self.problem.and_then(|problem| problem.quant).is_some_and(|quant| quant.scale == ScaleKind::Current);
        if let Some(scales) = self.views[Tensor::Scales as usize].filter(|_| is_found) {
            self.views[Tensor::Scale as usize] = Some(View { tensor: Tensor::Scale, is_written: false, ..scales });
        }
    }

    /// The positions of dweight and dbias.
    pub(super) fn gradients(&self) -> impl Iterator<Item = Placed> {
        self.all().filter(|view| view.is_gradient()).map(View::of_vector)
    }

    /// Whether an input shares its buffer with an output: in the programs that read matrices, and
    /// in the program that sums partial gradients. wgpu allows such a buffer in a dispatch only if
    /// all its bindings are writable.
    pub(super) fn aliases(&self) -> (bool, bool) {
        let written = || self.all().filter(|view| view.is_written && !view.is_gradient());
        // Some programs write the workspace, others only read it.
        let is_read = |view: &View<'_>, written: Tensor| {
            // A program transposes codes. No program both reads and writes a computed scale.
            let is_transposed = (view.tensor, written) == (Tensor::Codes, Tensor::CodesT);
            let is_found = (view.tensor, written) == (Tensor::Scale, Tensor::Scales);
            !is_found && (is_transposed || !view.is_written || view.tensor == Tensor::Workspace)
        };
        let is_aliased = self.all().any(|read| {
            written().any(|view| view.buffer == read.buffer && view.tensor != read.tensor && is_read(read, view.tensor))
        });
        let reduce_aliased = self
            .get(Tensor::Workspace)
            .is_some_and(|workspace| self.all().any(|view| view.is_gradient() && view.buffer == workspace.buffer));
        (is_aliased, reduce_aliased)
    }

    /// The tensors of the call.
    fn all(&self) -> impl Iterator<Item = &View<'a>> {
        self.views.iter().flatten()
    }

    /// Adds a tensor of the call.
    ///
    /// # Errors
    /// `InvalidArgument`, with the name of the tensor, if it cannot be bound.
    pub(crate) fn add<T: AnyElement>(
        &mut self,
        tensor: Tensor,
        rows: Rows<WgpuSlice<'a, T>>,
        is_written: bool,
    ) -> Result<(), Error> {
        let (shape, row_stride) = self.shape(tensor, &rows);
        let (buffer, offset, len) = (rows.view.buffer(), rows.view.offset(), rows.view.len() as u64);
        let name = self.problem.map_or(tensor.name(), |problem| problem.arg(tensor));
        let view = View { tensor, name, buffer, offset, len, storage: T::STORAGE, shape, row_stride, is_written };
        view.check()?;
        self.views[tensor as usize] = Some(view);
        self.give_found_scale();
        Ok(())
    }

    fn shape<V>(&self, tensor: Tensor, rows: &Rows<V>) -> (Shape, u64) {
        let Some(Problem { rows: count, groups, .. }) = self.problem else { return (Shape::PerRow(1), 0) };
        match tensor.shape() {
            TensorShape::Matrix => (Shape::Rows(rows.layout(count, self.cols)), 0),
            TensorShape::Cols => (Shape::Columns, 0),
            TensorShape::Rows => (Shape::PerRow(groups), 0),
            TensorShape::Transposed => (Shape::Whole, rows.layout(self.cols, count).row_stride as u64),
            TensorShape::One | TensorShape::Scales | TensorShape::ScalesColumnwise | TensorShape::Workspace => {
                (Shape::Whole, 0)
            }
        }
    }
}

impl<'a> View<'a> {
    /// The elements of a copy of this tensor, or of a part.
    pub(super) const fn elements(self, buffer: &'a Buffer, offset: u64) -> Self {
        View { buffer, offset, shape: Shape::PerRow(1), row_stride: 0, ..self }
    }

    fn is_gradient(&self) -> bool {
        matches!(self.shape, Shape::Columns) && self.is_written
    }

    fn of_vector(&self) -> Placed {
        Placed::vector(self.storage, self.offset)
    }

    fn of_rows(&self, layout: &RowLayout, rows_per_group: Option<usize>) -> Placed {
        let group_stride = layout.group_stride(rows_per_group) as u64;
        Placed { row_stride: layout.row_stride as u64, group_stride, ..self.of_vector() }
    }

    /// Bytes of an element.
    pub(super) fn element(&self) -> u64 {
        self.storage.size() as u64
    }

    fn check(&self) -> Result<(), Error> {
        let View { name, buffer, offset, len, storage, .. } = self;
        let (element, size, usage) = (self.element(), buffer.size(), buffer.usage());
        if !offset.is_multiple_of(element) {
            let rule = format!("a tensor begins at a multiple of its element's size, got {storage} at byte {offset}");
            return Err(invalid(name, rule));
        }
        let end = len.checked_mul(element).and_then(|bytes| bytes.checked_add(*offset));
        let Some(end) = end.filter(|end| *end <= size) else {
            let rule = format!("a tensor lies within its buffer, got {len} {storage} from byte {offset} of {size}");
            return Err(invalid(name, rule));
        };
        if !usage.contains(BufferUsages::STORAGE) {
            return Err(invalid(name, format!("a tensor's buffer needs BufferUsages::STORAGE, got {usage:?}")));
        }
        // Shaders access words, so a binding must have whole words.
        if end.next_multiple_of(4) > size {
            let rule = format!(
                "a buffer of 8-bit or 16-bit elements needs a size that is a multiple of 4, got a tensor at the end of {size}: \
                 pad the buffer"
            );
            return Err(invalid(name, rule));
        }
        Ok(())
    }
}
