//! The places of a call's tensors in memory: their sizes are right, and no output overlaps another
//! tensor.

use std::iter;

use crate::args::{SpanVisitor, View, Views};
use crate::quant::QuantSpec;
use crate::{
    Access, DType, DTypes, Direction, Error, NormBackend, NormSpec, Parts, RowGroups, RowLayout, Rows, Span, Storage,
    Tensor, TensorSet, TensorShape,
};

/// One tensor of a call, as the checks need it.
#[derive(Clone, Copy)]
pub(super) struct Placed {
    arg: &'static str,
    storage: Storage,
    /// `None` for a vector.
    matrix: Option<RowLayout>,
    /// The groups that the caller gave, if all rows lie in the first.
    single_group: Option<RowGroups>,
    span: Span,
    bytes: (u64, u64),
}

/// The tensors of a call, indexed as in [`Tensor::ALL`]: a fixed array, because a call must not
/// allocate.
pub(super) struct Layout {
    direction: Direction,
    dtypes: DTypes,
    rows: usize,
    cols: usize,
    /// The groups of columns, each with its own statistics.
    groups: usize,
    /// The tensors that have only a rank's own rows, and the number of these rows.
    own: Option<(TensorSet, usize)>,
    /// Determines the length of scales.
    quant: Option<QuantSpec>,
    /// The parts of `x`, if there are several.
    parts: Option<Parts>,
    tensors: TensorSet,
    outputs: TensorSet,
    /// The rows of a group, in all grouped matrices.
    rows_per_group: Option<usize>,
    list: [Option<Placed>; Tensor::COUNT],
}

impl Layout {
    /// The tensors of the call and the rows of their groups, if sizes are right and no output
    /// overlaps another tensor.
    pub(super) fn check<'a, B: NormBackend + ?Sized>(
        spec: &NormSpec,
        call: (Direction, DTypes),
        quant: Option<&QuantSpec>,
        parts: Option<Parts>,
        args: &impl Views<'a, B>,
    ) -> Result<(TensorSet, Option<usize>), Error> {
        let parts = parts.filter(|parts| parts.count > 1);
        let mut layout = Layout::new(spec, call);
        (layout.quant, layout.parts) = (quant.copied(), parts);
        layout.of_spans(|layout| args.spans(layout))
    }

    /// The same check for tensors that `spans` visits.
    pub(super) fn check_spans(
        spec: &NormSpec,
        call: (Direction, DTypes),
        spans: impl FnOnce(&mut Layout) -> Result<(), Error>,
    ) -> Result<(TensorSet, Option<usize>), Error> {
        Layout::new(spec, call).of_spans(spans)
    }

    /// The same check if some tensors have only a rank's own rows.
    pub(super) fn check_own_rows(
        spec: &NormSpec,
        call: (Direction, DTypes),
        own: (TensorSet, usize),
        spans: impl FnOnce(&mut Layout) -> Result<(), Error>,
    ) -> Result<(TensorSet, Option<usize>), Error> {
        let mut layout = Layout::new(spec, call);
        layout.own = Some(own);
        layout.of_spans(spans)
    }

    fn new(spec: &NormSpec, (direction, dtypes): (Direction, DTypes)) -> Self {
        Layout {
            direction,
            dtypes,
            rows: spec.rows,
            cols: spec.cols,
            groups: spec.groups,
            own: None,
            quant: None,
            parts: None,
            tensors: TensorSet::NONE,
            outputs: TensorSet::NONE,
            rows_per_group: None,
            list: [None; Tensor::COUNT],
        }
    }

    /// The number of rows of a tensor.
    fn rows_of(&self, tensor: Tensor) -> usize {
        self.own.filter(|(tensors, _)| tensors.has(tensor)).map_or(self.rows, |(_, rows)| rows)
    }

    /// By reference: `Layout` holds every tensor, and a copy would take as long as the checks.
    fn of_spans(
        &mut self,
        spans: impl FnOnce(&mut Layout) -> Result<(), Error>,
    ) -> Result<(TensorSet, Option<usize>), Error> {
        spans(self)?;
        self.check_overlap()?;
        Ok((self.tensors, self.rows_per_group))
    }

    /// The view's elements have the type that the call's dtypes and codes require. A sum that
    /// replaces a gradient is f32.
    fn check_storage(&self, tensor: Tensor, view: &View) -> Result<(), Error> {
        let is_sum = matches!(tensor, Tensor::Dweight | Tensor::Dbias) && view.arg != tensor.name();
        let expected = match is_sum {
            true => Some(Storage::Float(DType::F32)),
            false => tensor.storage(self.direction, self.dtypes, self.quant.as_ref()),
        };
        match expected.filter(|expected| *expected != view.storage) {
            None => Ok(()),
            Some(expected) => {
                let rule = format!("its elements are {expected} by the dtypes of the call, got {}", view.storage);
                Err(Error::InvalidArgument { arg: view.arg, rule })
            }
        }
    }

    /// The layout of a matrix of this shape, if its rows and groups do not interleave, and the
    /// fewest and most elements of its view.
    fn matrix(&mut self, view: &View, shape: (usize, usize)) -> Result<(RowLayout, (usize, usize)), Error> {
        let (arg, rows) = (view.arg, view.rows.layout(shape.0, shape.1));
        let RowLayout { rows: count, cols, row_stride, groups } = rows;
        if row_stride < cols {
            return Err(Error::Stride { arg, cols, got: row_stride });
        }
        if let Some(groups) = groups {
            self.check_groups(arg, &rows, groups)?;
        }
        // A byte size above isize::MAX cannot be a Rust slice, and no backend can index it.
        let most = most_elements(view.storage);
        let Some(padded) = rows.padded_span().filter(|&padded| padded <= most) else {
            let storage = view.storage;
            let Some(RowGroups { stride, .. }) = groups else {
                return Err(Error::TooLarge { arg, rows: count, row_stride, storage });
            };
            let rule = format!(
                "{count} rows in groups at a stride of {stride} {storage} elements exceed the largest size of {} bytes",
                isize::MAX
            );
            return Err(Error::InvalidArgument { arg, rule });
        };
        // The view may end with the last row or group, or with its padding to the stride. The
        // padding counts as the caller gave it: also for a single group, or for groups that the
        // layout replaced with one stride.
        let padded = view.padded_span(shape.0).filter(|&given| given <= most).map_or(padded, |given| given.max(padded));
        Ok((rows, (rows.span(), padded)))
    }

    /// The fewest and most elements of `x` as a view of several matrices with these elements each.
    fn parts(&self, view: &View, parts: Parts, (min, max): (usize, usize)) -> Result<(usize, usize), Error> {
        let most = most_elements(view.storage);
        match parts.span().and_then(|behind| Some((min.checked_add(behind)?, max.checked_add(behind)?))) {
            // Without rows no part has elements.
            _ if min == 0 => Ok((min, max)),
            Some(len) if len.1 <= most => Ok(len),
            Some(_) | None => {
                let Parts { count, stride } = parts;
                let rule = format!(
                    "{count} parts at a stride of {stride} {} elements exceed the largest size of {} bytes",
                    view.storage,
                    isize::MAX
                );
                Err(Error::InvalidArgument { arg: view.arg, rule })
            }
        }
    }

    /// The number of scales of a quantized matrix of this shape.
    fn scales(&self, view: &View, quant: Option<QuantSpec>, (rows, cols): (usize, usize)) -> Result<usize, Error> {
        let Some(quant) = quant else { return Ok(0) };
        quant.scales_len(rows, cols).ok_or_else(|| {
            let rule = format!(
                "the layout {:?} must have ld >= rows and a length that fits usize, got {rows} rows of {cols} columns",
                quant.layout
            );
            Error::InvalidArgument { arg: view.arg, rule }
        })
    }

    /// Groups of rows do not interleave, and have one size throughout the call.
    fn check_groups(&mut self, arg: &'static str, rows: &RowLayout, groups: RowGroups) -> Result<(), Error> {
        let RowGroups { rows: count, stride } = groups;
        let refuse = |rule| Err(Error::InvalidArgument { arg, rule });
        if !rows.follow_one_another() {
            let row_stride = rows.row_stride;
            return refuse(format!(
                "groups must have at least 1 row and must not overlap, got groups of {count} rows at a stride of \
                 {row_stride}, {stride} elements from group to group"
            ));
        }
        match self.rows_per_group.replace(count) {
            Some(other) if other != count => refuse(format!(
                "all matrices of a call must have the same number of rows in a group, got {count} and {other}"
            )),
            Some(_) | None => Ok(()),
        }
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

/// The most elements that an allocation can have. Sizes are powers of two, and a shift is faster
/// than a division.
const fn most_elements(storage: Storage) -> usize {
    (isize::MAX as usize) >> storage.size().trailing_zeros()
}

impl SpanVisitor for Layout {
    fn visit(&mut self, tensor: Tensor, view: View) -> Result<(), Error> {
        let view = View { arg: self.tensors.arg_of_cast(tensor).unwrap_or(view.arg), ..view };
        self.check_storage(tensor, &view)?;
        let rows = self.rows_of(tensor);
        let (matrix, (min, max)) = match tensor.shape() {
            TensorShape::Matrix => {
                let (matrix, len) = self.matrix(&view, (rows, self.cols))?;
                match self.parts.filter(|_| tensor == Tensor::X) {
                    Some(parts) => (None, self.parts(&view, parts, len)?),
                    None => (Some(matrix), len),
                }
            }
            TensorShape::Transposed => {
                self.matrix(&view, (self.cols, self.rows)).map(|(rows, len)| (Some(rows), len))?
            }
            TensorShape::Cols => (None, (self.cols, self.cols)),
            TensorShape::Rows => {
                // A product beyond usize is longer than any view.
                let len = rows.saturating_mul(self.groups);
                (None, (len, len))
            }
            // The backend determines the length, from the problem.
            TensorShape::Workspace => (None, (0, usize::MAX)),
            TensorShape::One => (None, (1, 1)),
            TensorShape::Scales => {
                let len = self.scales(&view, self.quant, (self.rows, self.cols))?;
                (None, (len, len))
            }
            TensorShape::ScalesColumnwise => {
                let quant = self.quant.map(|quant| quant.columnwise());
                let len = self.scales(&view, quant, (self.cols, self.rows))?;
                (None, (len, len))
            }
        };
        let single_group = matrix.and_then(|rows| view.single_group(&rows));
        let View { arg, storage, rows: Rows { view: span, .. } } = view;
        if !(min..=max).contains(&span.len) {
            return Err(Error::Length { arg, min, max, got: span.len });
        }
        self.tensors = self.tensors.with(tensor);
        let is_output = tensor.access(self.direction) == Some(Access::Write);
        self.outputs = self.outputs.set(tensor, is_output);
        self.list[tensor as usize] =
            Some(Placed { arg, storage, matrix, single_group, span, bytes: bytes(&span, storage) });
        Ok(())
    }
}

/// First byte and one past the last. No view reaches beyond the last address.
const fn bytes(span: &Span, storage: Storage) -> (u64, u64) {
    let (start, len) = (span.start, span.len as u64);
    (start, start.saturating_add(len.saturating_mul(storage.size() as u64)))
}

impl Placed {
    /// A tensor that occupies every element of its view, gaps between rows included.
    pub(super) fn whole(view: &View) -> Self {
        let View { arg, storage, rows: Rows { view: span, .. } } = *view;
        Placed { arg, storage, matrix: None, single_group: None, span, bytes: bytes(&span, storage) }
    }

    /// Whether the two share an element. Interleaved rows (slices of one fused buffer) share none.
    pub(super) fn overlaps(&self, other: &Placed) -> bool {
        let (a, b) = (self.bytes, other.bytes);
        // They meet if the later start lies before the earlier end; never for a view without
        // elements.
        let ranges_meet = self.span.allocation == other.span.allocation && a.0.max(b.0) < a.1.min(b.1);
        ranges_meet && !self.takes_turns_with(other)
    }

    /// Compares their rows with one stride or two; a single group is also compared as the first of
    /// several.
    fn takes_turns_with(&self, other: &Placed) -> bool {
        self.patterns().any(|pattern| other.patterns().any(|other| pattern.takes_turns_with(&other)))
    }

    /// Empty for a vector.
    fn patterns(&self) -> impl Iterator<Item = Pattern> {
        iter::once(None).chain(self.single_group.map(Some)).filter_map(|single_group| self.pattern(single_group))
    }

    fn in_bytes(&self, elements: usize) -> u128 {
        elements as u128 * self.storage.size() as u128
    }

    /// The pattern of a matrix, with these groups if it has no others.
    fn pattern(&self, single_group: Option<RowGroups>) -> Option<Pattern> {
        let RowLayout { cols, row_stride, groups, .. } = self.matrix?;
        let groups = groups.or(single_group).unwrap_or(RowGroups { rows: 1, stride: row_stride });
        Some(Pattern {
            start: u128::from(self.span.start),
            row: self.in_bytes(cols),
            rows: groups.rows as u128,
            row_stride: if groups.rows == 1 { 0 } else { self.in_bytes(row_stride) },
            period: self.in_bytes(groups.stride),
        })
    }
}

/// The bytes of a matrix as an endless pattern: it repeats a group of rows, or one row if there are
/// no groups.
struct Pattern {
    start: u128,
    /// Bytes of a row.
    row: u128,
    /// Rows of a group.
    rows: u128,
    /// Bytes from row to row of a group; 0 for groups of one row.
    row_stride: u128,
    /// Bytes from group to group.
    period: u128,
}

impl Pattern {
    /// Whether the two have the same period and share no byte: their groups lie side by side, or
    /// their rows do.
    fn takes_turns_with(&self, other: &Pattern) -> bool {
        if self.period == 0 || self.period != other.period {
            return false;
        }
        let distance = (other.start % self.period + self.period - self.start % self.period) % self.period;
        let groups_are_apart = distance >= self.len() && distance + other.len() <= self.period;
        let is_alike = (self.rows, self.row_stride) == (other.rows, other.row_stride) && self.rows > 1;
        // One group of `other` begins within this period, and the previous one a period earlier.
        groups_are_apart
            || is_alike && self.rows_are_apart(other, distance) && other.rows_are_apart(self, self.period - distance)
    }

    /// Bytes from the first row of a group to the end of its last.
    fn len(&self) -> u128 {
        (self.rows - 1) * self.row_stride + self.row
    }

    /// Whether no row of this group overlaps a row of an equal group that begins `distance` bytes
    /// later.
    fn rows_are_apart(&self, later: &Pattern, distance: u128) -> bool {
        // The row of this group at or before the later group's first row; or this group has ended.
        let row = distance / self.row_stride;
        let into = distance % self.row_stride;
        let before = row >= self.rows || into >= self.row;
        // The next row of this group overlaps the later group's first row if that is long; the last
        // row has no next row.
        let after = row + 1 >= self.rows || into + later.row <= self.row_stride;
        before && after
    }
}
