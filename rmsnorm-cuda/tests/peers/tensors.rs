//! A rank's tensors on its device, between memory that must not change.

use std::ops::Range;

use rmsnorm_conformance::Harness;
use rmsnorm_conformance::testing::Bits;
use rmsnorm_cuda::cudarc::driver::{CudaSlice, CudaView, CudaViewMut, DeviceRepr};
use rmsnorm_cuda::spec::{Checked, Element, Error, Forward, OutputRows, Problem, Rows};
use rmsnorm_cuda::{CudaBackend, PeerGroup};
use rmsnorm_dist::{RowShares, ShardedNorm};

use crate::case::{Case, Data};

/// The initial value of all memory that must not change.
pub const POISON: u32 = 0x5a5a_5a5a;

/// The results of a call, row by row without gaps.
#[derive(Clone, Debug)]
pub struct Output {
    /// `None` if the call does not store it.
    pub h: Option<Bits>,
    pub y: Bits,
    /// Only for layer norm.
    pub mean: Option<Bits>,
    pub rstd: Bits,
}

impl PartialEq for Output {
    fn eq(&self, other: &Self) -> bool {
        let bits = |output: &Output| {
            let Output { h, y, mean, rstd } = output;
            [h.as_ref(), Some(y), mean.as_ref(), Some(rstd)].map(|tensor| tensor.map(|tensor| tensor.bits.clone()))
        };
        bits(self) == bits(other)
    }
}

struct Matrix<E> {
    buffer: CudaSlice<E>,
    /// The start of each row.
    starts: Vec<usize>,
}

impl<E: Element> Matrix<E> {
    /// A matrix with these dense values, or only poison.
    fn new(backend: &CudaBackend, case: &Case, rank: usize, values: Option<&[E]>) -> Self {
        let (rows, cols) = (case.spec.rows, case.spec.cols);
        let start = |row: usize| match case.groups() {
            Some(groups) => row / groups.rows * groups.stride + row % groups.rows * case.stride(),
            None => row * case.stride(),
        };
        let starts: Vec<usize> = (0..rows).map(|row| case.offset_of(rank) + start(row)).collect();
        let len = starts.last().map_or(case.offset_of(rank), |last| last + cols) + case.gap;
        let matrix = Matrix { buffer: backend.upload(&vec![E::from_bits(POISON); len.max(1)]).unwrap(), starts };
        let mut matrix = matrix;
        if let Some(values) = values {
            matrix.fill(backend, cols, values);
        }
        matrix
    }

    /// Writes new values to the rows, and poison elsewhere.
    fn fill(&mut self, backend: &CudaBackend, cols: usize, values: &[E]) {
        let mut host = vec![E::from_bits(POISON); self.buffer.len()];
        for (row, start) in self.starts.iter().enumerate() {
            host[*start..start + cols].copy_from_slice(&values[row * cols..(row + 1) * cols]);
        }
        let new = backend.upload(&host).unwrap();
        // Keeps the address, which a graph contains.
        backend.stream().memcpy_dtod(&new, &mut self.buffer).unwrap();
        backend.stream().synchronize().unwrap();
    }

    fn dense(&self, backend: &CudaBackend, cols: usize) -> Bits {
        let host = backend.download(&self.buffer).unwrap();
        let mut is_row = vec![false; host.len()];
        for start in &self.starts {
            is_row[*start..start + cols].fill(true);
        }
        let poison = E::from_bits(POISON).bits();
        let breach = host.iter().zip(&is_row).position(|(value, is_row)| !is_row && value.bits() != poison);
        assert_eq!(breach, None, "an element that is in no row was written");
        Bits::of(&host.iter().zip(is_row).filter_map(|(value, is_row)| is_row.then_some(*value)).collect::<Vec<E>>())
    }

    fn rows<V>(case: &Case, view: V) -> Rows<V> {
        match case.groups() {
            Some(groups) => Rows::grouped(view, case.stride(), groups),
            None => Rows::strided(view, case.stride()),
        }
    }

    /// The elements of these rows.
    fn elements(&self, rows: &Range<usize>) -> Range<usize> {
        let start = |row: usize| self.starts.get(row).copied().unwrap_or(self.buffer.len());
        if rows.is_empty() { 0..0 } else { start(rows.start)..start(rows.end) }
    }

    fn read(&self, case: &Case, rows: &Range<usize>) -> Rows<CudaView<'_, E>> {
        Self::rows(case, self.buffer.slice(self.elements(rows)))
    }

    fn write(&mut self, case: &Case, rows: &Range<usize>) -> Rows<CudaViewMut<'_, E>> {
        let elements = self.elements(rows);
        Self::rows(case, self.buffer.slice_mut(elements))
    }
}

/// The tensors of one rank.
pub struct Tensors<T, W, R> {
    case: Case,
    rank: usize,
    x: Matrix<T>,
    y: Matrix<T>,
    residual: Matrix<R>,
    residual_out: Matrix<R>,
    weight: CudaSlice<W>,
    bias: CudaSlice<W>,
    mean: CudaSlice<f32>,
    rstd: CudaSlice<f32>,
}

impl<T: Element + DeviceRepr, W: Element, R: Element + DeviceRepr> Tensors<T, W, R> {
    pub fn new(backend: &CudaBackend, case: &Case, data: &Data<T, W, R>, rank: usize) -> Self {
        let statistics = || backend.upload(&vec![f32::from_bits(POISON); case.spec.rows.max(1)]).unwrap();
        Tensors {
            case: *case,
            rank,
            x: Matrix::new(backend, case, rank, Some(&data.x[rank])),
            y: Matrix::new(backend, case, rank, None),
            residual: Matrix::new(backend, case, rank, Some(&data.residual)),
            residual_out: Matrix::new(backend, case, rank, None),
            weight: backend.upload(&data.weight).unwrap(),
            bias: backend.upload(&data.bias).unwrap(),
            mean: statistics(),
            rstd: statistics(),
        }
    }

    /// Replaces the data of all tensors.
    pub fn fill(&mut self, backend: &CudaBackend, data: &Data<T, W, R>) {
        let cols = self.case.spec.cols;
        self.x.fill(backend, cols, &data.x[self.rank]);
        self.residual.fill(backend, cols, &data.residual);
        let stream = backend.stream();
        stream.memcpy_dtod(&backend.upload(&data.weight).unwrap(), &mut self.weight).unwrap();
        stream.memcpy_dtod(&backend.upload(&data.bias).unwrap(), &mut self.bias).unwrap();
        stream.synchronize().unwrap();
    }

    fn args(&mut self) -> Forward<'_, CudaBackend, T, W, R> {
        let all = 0..self.case.spec.rows;
        self.args_of(&all.clone(), &all)
    }

    /// Arguments with these rows of the residual, the sum and the statistics, and the rows `of_y`
    /// of y if it is not in place.
    fn args_of(&mut self, own: &Range<usize>, of_y: &Range<usize>) -> Forward<'_, CudaBackend, T, W, R> {
        let case = &self.case;
        let all = 0..case.spec.rows;
        let is_layer = case.spec.norm == rmsnorm_cuda::spec::Norm::Layer;
        let args: Forward<'_, CudaBackend, T> = if case.is_in_place {
            Forward::in_place(self.x.write(case, &all))
        } else {
            Forward::new(self.x.read(case, &all), self.y.write(case, of_y))
        };
        let mut args = args.weight_dtype::<W>().residual_dtype::<R>().rstd(self.rstd.slice_mut(own.clone()));
        if is_layer {
            args = args.mean(self.mean.slice_mut(own.clone()));
        }
        if case.has_residual && case.is_in_place {
            args = args.residual_in_place(self.residual.write(case, own));
        } else if case.has_residual {
            args = args.residual(self.residual.read(case, own)).residual_out(self.residual_out.write(case, own));
        }
        if case.has_weight {
            args = args.weight(self.weight.as_view());
        }
        if case.has_bias {
            args = args.bias(self.bias.as_view());
        }
        args
    }

    /// Compiles and loads the kernels of `call`.
    pub fn prepare(&mut self, group: &PeerGroup) -> Result<(), Error> {
        let (problem, alignment) = self.problem()?;
        group.prepare(&problem, alignment)
    }

    /// Compiles and loads the kernels of `call_on_rows`.
    pub fn prepare_rows(&mut self, group: &PeerGroup) -> Result<(), Error> {
        let (problem, alignment) = self.problem()?;
        group.prepare_rows(&problem, alignment)
    }

    /// The problem of a call, and the alignment of its addresses and strides.
    fn problem(&mut self) -> Result<(Problem, usize), Error> {
        let (case, spec) = (self.case, self.case.spec);
        let problem: Problem = *Checked::forward(spec, self.args())?.problem();
        // Buffers are aligned to 256 bytes.
        let sizes = [size_of::<T>(), size_of::<R>()].into_iter().take(if case.has_residual { 2 } else { 1 });
        let groups = case.groups().map_or(0, |groups| groups.stride);
        let strides = if spec.rows > 1 { case.stride() | groups } else { 0 };
        let bits = sizes.fold(0, |bits, size| bits | ((case.offset_of(self.rank) | strides) * size));
        // Sizes are powers of two, so the lowest bit is that of the smallest product.
        Ok((problem, 1 << (bits | 16).trailing_zeros()))
    }

    pub fn call(&mut self, group: &PeerGroup) -> Result<(), Error> {
        let spec = self.case.spec;
        group.forward_reduced(&spec, self.args())
    }

    /// A call whose residual is divided by rows; this rank passes its own rows.
    pub fn call_on_rows(&mut self, group: &PeerGroup, y_rows: OutputRows) -> Result<(), Error> {
        let spec = self.case.spec;
        let own = self.own_rows(group);
        let of_y = if y_rows == OutputRows::Own { own.clone() } else { 0..spec.rows };
        group.forward_reduced_rows(&spec, y_rows, self.args_of(&own, &of_y))
    }

    /// The rows that this rank owns.
    pub fn own_rows(&self, group: &PeerGroup) -> Range<usize> {
        RowShares { units: self.case.spec.rows, unit: 1, ranks: group.ranks() }.units(self.rank)
    }

    /// The bytes of y and the sum, for a fast comparison.
    pub fn bytes(&self, backend: &CudaBackend) -> [Vec<u8>; 2] {
        let y = bytemuck::cast_slice(&backend.download(&self.y.buffer).unwrap()).to_vec();
        [y, bytemuck::cast_slice(&backend.download(&self.residual_out.buffer).unwrap()).to_vec()]
    }

    /// The results, read after all calls are done.
    pub fn output(&self, backend: &CudaBackend) -> Output {
        let (case, cols) = (&self.case, self.case.spec.cols);
        let statistic = |buffer| Bits::of(&backend.download_part::<f32>(buffer, 0..case.spec.rows).unwrap());
        let y = if case.is_in_place { &self.x } else { &self.y };
        let h = if case.is_in_place { &self.residual } else { &self.residual_out };
        Output {
            h: case.has_residual.then(|| h.dense(backend, cols)),
            y: y.dense(backend, cols),
            mean: (case.spec.norm == rmsnorm_cuda::spec::Norm::Layer).then(|| statistic(&self.mean)),
            rstd: statistic(&self.rstd),
        }
    }
}
