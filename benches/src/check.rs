//! The judgement before the clock starts: what is timed must be right.
//!
//! Outputs are filled with NaN, the call is made, and the first and the last rows are held to the bounds of math.md;
//! of dweight and dbias, sums over all rows, as many columns as are cheap. Inputs are known without the device, so only
//! what is judged is downloaded. The copy that a call is compared with is held to all of its elements.

use std::ops::Range;

use rmsnorm_core::conformance::Arithmetic;
use rmsnorm_core::conformance::bounds::{Mode, Model, Statistics};
use rmsnorm_core::conformance::judge::Verdict;
use rmsnorm_core::conformance::testing::{BackwardTruth, Bits, ForwardTruth, Given, QuantizedTruth, exact};
use rmsnorm_core::quant::{QuantSpec, ScaleKind, ScaleLayout, ScaleType};
use rmsnorm_core::reference::{BackwardInputs, ForwardInputs};
use rmsnorm_core::{Element, Error, Norm, Stored, Tensor};

use crate::workload::{GIVEN_SCALE, spec, tensors, unset_codes};
use crate::{Measurable, Op, Operation, Quant, Shape, Workload};

/// Rows at either end of a result that are judged, at most.
const JUDGED_ROWS: usize = 16;

/// Elements at either end of a result that are judged, unless that is less than a row. The device waits meanwhile: this
/// takes a tenth of a second.
const JUDGED_ELEMENTS: usize = 1 << 18;

/// Terms of the sums over rows that are judged, at most, unless that is less than two columns: all columns of 4096x256.
const JUDGED_TERMS: usize = 1 << 20;

impl<D: Measurable, T: Element> Workload<'_, D, T> {
    /// Runs the operation once and gives the number of elements that are outside their error bounds.
    ///
    /// # Errors
    /// What the backend says.
    pub fn wrong_elements(&mut self, operation: Operation) -> Result<usize, Error> {
        self.wrong_after(operation, |workload, operation| workload.call(operation, 0))
    }

    /// The same of that device, which has the tensors of this one and plans of its own.
    pub(crate) fn wrong_elements_on(&mut self, device: &D, operation: Operation) -> Result<usize, Error> {
        self.wrong_after(operation, |workload, operation| workload.call_on(device, operation, 0))
    }

    /// The same for calls that are made in this way, on the first set.
    fn wrong_after(
        &mut self,
        operation: Operation,
        call: impl Fn(&mut Self, Operation) -> Result<(), Error>,
    ) -> Result<usize, Error> {
        let norm = operation.norm;
        self.poison()?;
        match operation.op {
            Op::Forward | Op::AddForward => {
                call(self, operation)?;
                self.wrong_in_forward(norm, operation.op == Op::AddForward)
            }
            Op::ForwardAdd | Op::ForwardAddForward => {
                call(self, operation)?;
                self.wrong_in_sums(norm, operation.op == Op::ForwardAddForward)
            }
            Op::QuantizedForward(quant) | Op::AddQuantizedForward(quant) => {
                self.poison_codes()?;
                call(self, operation)?;
                self.wrong_in_codes(norm, quant, matches!(operation.op, Op::AddQuantizedForward(_)))
            }
            Op::Backward => {
                // It needs the statistics of x alone.
                call(self, Operation { op: Op::Forward, ..operation })?;
                self.poison_rows_of_out()?;
                call(self, operation)?;
                self.wrong_in_backward(operation)
            }
        }
    }

    /// Copies the first and the last set in each of the device's ways, onto NaN, and gives the number of elements that
    /// did not arrive: every percentage rests on the copy.
    ///
    /// # Errors
    /// What the device says.
    pub fn wrong_copies(&mut self) -> Result<usize, Error> {
        let (len, last) = (self.shape.elements(), self.sets.len() - 1);
        let judged = if last == 0 { vec![0] } else { vec![0, last] };
        let mut wrong = 0;
        for way in 0..D::COPIES {
            for &set in &judged {
                // First gone, then made anew: a device may have no room for both. Not by a copy, whose faults this is about.
                self.sets[set].out = self.nan(0)?;
                self.sets[set].out = self.nan(len)?;
                self.copy(set, way)?;
                wrong += self.not_copied(set)?;
            }
        }
        Ok(wrong)
    }

    /// Elements of a set's x that its `out` does not have, bit for bit.
    fn not_copied(&self, set: usize) -> Result<usize, Error> {
        let (from, to) = (self.device.download(&self.sets[set].x)?, self.device.download(&self.sets[set].out)?);
        let unlike = from.iter().zip(&to).filter(|(from, to)| from.bits() != to.bits()).count();
        Ok(unlike + from.len().abs_diff(to.len()))
    }

    /// NaN wherever a result is judged: an element that is not written must not pass.
    fn poison(&mut self) -> Result<(), Error> {
        let Shape { rows, cols } = self.shape;
        (self.mean, self.rstd) = (self.nan(rows)?, self.nan(rows)?);
        (self.next_mean, self.next_rstd) = (self.nan(rows)?, self.nan(rows)?);
        (self.dweight, self.dbias) = (self.nan(cols)?, self.nan(cols)?);
        for rows in self.judged_rows() {
            let (elements, nan) = (self.elements(&rows), self.nan(rows.len() * cols)?);
            let from = self.device.view(&nan, 0..elements.len());
            self.device.copy(from, self.device.view_mut(&mut self.sets[0].residual_out, elements), 0)?;
        }
        self.poison_rows_of_out()
    }

    fn poison_rows_of_out(&mut self) -> Result<(), Error> {
        for rows in self.judged_rows() {
            let elements = self.elements(&rows);
            let nan = self.nan(elements.len())?;
            let from = self.device.view(&nan, 0..elements.len());
            self.device.copy(from, self.device.view_mut(&mut self.sets[0].out, elements), 0)?;
        }
        Ok(())
    }

    fn nan<E: Element>(&self, len: usize) -> Result<D::Buffer<E>, Error> {
        self.device.upload(&vec![E::from_f32(f32::NAN); len])
    }

    /// The first and the last rows, without a row twice.
    fn judged_rows(&self) -> [Range<usize>; 2] {
        let Shape { rows, cols } = self.shape;
        let most = (JUDGED_ELEMENTS / cols).clamp(1, JUDGED_ROWS);
        let first = 0..most.min(rows);
        let last = rows.saturating_sub(most).max(first.end)..rows;
        [first, last]
    }

    fn elements(&self, rows: &Range<usize>) -> Range<usize> {
        rows.start * self.shape.cols..rows.end * self.shape.cols
    }

    fn wrong_in_forward(&self, norm: Norm, add: bool) -> Result<usize, Error> {
        let arithmetic = self.device.arithmetic();
        let (rstd, mean) = (self.device.download(&self.rstd)?, self.device.download(&self.mean)?);
        let (weight, bias) = (self.vector(tensors::WEIGHT), self.vector(tensors::BIAS));
        let mut wrong = 0;
        for rows in self.judged_rows() {
            let elements = self.elements(&rows);
            let (x, residual) = (self.values(tensors::X, &elements), self.values(tensors::SECOND, &elements));
            let stored = if add { self.part(&self.sets[0].residual_out, elements.clone())? } else { Vec::new() };
            let inputs = ForwardInputs {
                x: &x,
                residual: add.then_some((&*residual, T::DTYPE)),
                weight: Some(&weight),
                bias: (norm == Norm::Layer).then_some(&*bias),
            };
            let spec = spec(norm, Shape { rows: rows.len(), ..self.shape });
            let h = add.then(|| exact(&stored));
            let truth = ForwardTruth::new(&spec, inputs, T::DTYPE, h.as_deref(), worst(&arithmetic));
            wrong += failures(&truth.judge(Tensor::Y, &self.part(&self.sets[0].out, elements)?));
            wrong += failures(&truth.judge(Tensor::Rstd, &rstd[rows.clone()]));
            if norm == Norm::Layer {
                wrong += failures(&truth.judge(Tensor::Mean, &mean[rows]));
            }
            if add {
                wrong += failures(&truth.judge(Tensor::ResidualOut, &stored));
            }
        }
        Ok(wrong)
    }

    /// Sums of a residual and a norm, and the next norm of them as they were stored.
    fn wrong_in_sums(&self, norm: Norm, has_next: bool) -> Result<usize, Error> {
        let arithmetic = self.device.arithmetic();
        let statistics =
            [&self.rstd, &self.mean, &self.next_rstd, &self.next_mean].map(|all| self.device.download(all));
        let [rstd, mean, next_rstd, next_mean] = statistics;
        let (rstd, mean, next_rstd, next_mean) = (rstd?, mean?, next_rstd?, next_mean?);
        let (weight, bias) = (self.vector(tensors::WEIGHT), self.vector(tensors::BIAS));
        let (next_weight, next_bias) = (self.vector(tensors::NEXT_WEIGHT), self.vector(tensors::NEXT_BIAS));
        let (weight, bias) = (Some(&*weight), (norm == Norm::Layer).then_some(&*bias));
        let mut wrong = 0;
        for rows in self.judged_rows() {
            let elements = self.elements(&rows);
            let (x, residual) = (self.values(tensors::X, &elements), self.values(tensors::SECOND, &elements));
            let stored = self.part(&self.sets[0].residual_out, elements.clone())?;
            let spec = spec(norm, Shape { rows: rows.len(), ..self.shape });
            let inputs = ForwardInputs { x: &x, residual: Some((&residual, T::DTYPE)), weight, bias };
            let truth = ForwardTruth::new(&spec.residual_after(), inputs, T::DTYPE, None, worst(&arithmetic));
            wrong += failures(&truth.judge(Tensor::ResidualOut, &stored));
            wrong += failures(&truth.judge(Tensor::Rstd, &rstd[rows.clone()]));
            let is_layer = norm == Norm::Layer;
            if is_layer {
                wrong += failures(&truth.judge(Tensor::Mean, &mean[rows.clone()]));
            }
            if has_next {
                let sum = exact(&stored);
                let (weight, bias) = (Some(&*next_weight), is_layer.then_some(&*next_bias));
                let inputs = ForwardInputs { x: &sum, residual: None, weight, bias };
                let truth = ForwardTruth::new(&spec, inputs, T::DTYPE, None, worst(&arithmetic));
                wrong += failures(&truth.judge(Tensor::Y, &self.part(&self.sets[0].out, elements)?));
                wrong += failures(&truth.judge(Tensor::Rstd, &next_rstd[rows.clone()]));
                if is_layer {
                    wrong += failures(&truth.judge(Tensor::Mean, &next_mean[rows]));
                }
            }
        }
        Ok(wrong)
    }

    fn poison_codes(&mut self) -> Result<(), Error> {
        self.sets[0].codes = unset_codes(self.device, self.codes_lens.0)?;
        self.sets[0].codes_t = unset_codes(self.device, self.codes_lens.1)?;
        self.scales = self.nan(self.scales_lens.0)?;
        self.scale_bytes = self.device.upload(&vec![u8::MAX; self.scales_lens.1])?;
        self.scales_along = self.nan(self.along_lens.0)?;
        self.scale_bytes_along = self.device.upload(&vec![u8::MAX; self.along_lens.1])?;
        self.amax = self.nan(1)?;
        Ok(())
    }

    /// Codes by the scales that came back, scales of rows and blocks by the largest results. Of a tensor's `amax` and own scale some
    /// rows tell that they are no less than theirs.
    fn wrong_in_codes(&self, norm: Norm, quant: Quant, add: bool) -> Result<usize, Error> {
        let Shape { rows: count, cols } = self.shape;
        let arithmetic = self.device.arithmetic();
        let (rstd, mean) = (self.device.download(&self.rstd)?, self.device.download(&self.mean)?);
        let (weight, bias) = (self.vector(tensors::WEIGHT), self.vector(tensors::BIAS));
        let (asked, groups) = (quant.spec(self.shape), quant.spec(self.shape).scale.groups(cols));
        let scales = self.device.download(&self.scales)?;
        let bytes = self.device.download(&self.scale_bytes)?;
        let has_codes_t = quant.tensors().has(Tensor::CodesT);
        let codes_t = if has_codes_t { self.device.download(&self.sets[0].codes_t)? } else { Vec::new() };
        let amax = if quant.tensors().has(Tensor::Amax) { self.device.download(&self.amax)? } else { Vec::new() };
        let mut wrong = 0;
        for rows in self.judged_rows().into_iter().filter(|rows| !rows.is_empty()) {
            let elements = self.elements(&rows);
            let (x, residual) = (self.values(tensors::X, &elements), self.values(tensors::SECOND, &elements));
            let stored = if add { self.part(&self.sets[0].residual_out, elements.clone())? } else { Vec::new() };
            let inputs = ForwardInputs {
                x: &x,
                residual: add.then_some((&*residual, T::DTYPE)),
                weight: Some(&weight),
                bias: (norm == Norm::Layer).then_some(&*bias),
            };
            let spec = spec(norm, Shape { rows: rows.len(), cols });
            let h = add.then(|| exact(&stored));
            let truth = ForwardTruth::new(&spec, inputs, T::DTYPE, h.as_deref(), worst(&arithmetic));
            let rstd = Bits::of(&rstd[rows.clone()]);
            wrong += failures(&truth.judge_bits(Tensor::Rstd, &rstd));
            if norm == Norm::Layer {
                wrong += failures(&truth.judge(Tensor::Mean, &mean[rows.clone()]));
            }
            if add {
                wrong += failures(&truth.judge(Tensor::ResidualOut, &stored));
            }
            // As if these rows were all, with scales row by row; one that was found is as good as one that was given.
            let (of_rows, scale) = match groups {
                Some(_) => (asked.layout(ScaleLayout::RowMajor), GIVEN_SCALE),
                None => {
                    let found = scales.first().copied().filter(|_| quant == Quant::Current).unwrap_or(GIVEN_SCALE);
                    (QuantSpec::new(asked.codes, ScaleKind::Given), found)
                }
            };
            let given = Given { scale: f64::from(scale), amax: 0.0 };
            let truth = QuantizedTruth::new(&spec, of_rows, given, &truth, (T::DTYPE, Some(&rstd)), &arithmetic);
            let place = |row: usize| {
                (0..groups.unwrap_or(0)).map(move |group| asked.layout.index(groups.unwrap_or(0), row, group))
            };
            let places: Vec<usize> = rows.clone().flat_map(place).collect();
            let got_scales = groups.map(|_| match asked.scale_type() {
                ScaleType::F32 => Bits::of(&places.iter().map(|&place| scales[place]).collect::<Vec<_>>()),
                ScaleType::E8m0 => Bits::of(&places.iter().map(|&place| bytes[place]).collect::<Vec<_>>()),
            });
            if let Some(scales) = &got_scales {
                wrong += failures(&truth.judge_scales(scales));
            }
            let codes = self.device.download_part(&self.sets[0].codes, elements)?;
            wrong += failures(&truth.judge_codes(&Bits::of(&codes), got_scales.as_ref()));
            if has_codes_t {
                let transposed = |index: usize| codes_t[index % cols * count + rows.start + index / cols];
                wrong += (0..codes.len()).filter(|&index| transposed(index).bits() != codes[index].bits()).count();
            }
            let least = truth.least_amax();
            let most = f64::from(asked.codes.largest()) * f64::from(scale) * (1.0 + 1e-6);
            wrong += amax.iter().filter(|amax| !(f64::from(**amax) >= least && amax.is_finite())).count();
            wrong += usize::from(quant == Quant::Current && most < least);
        }
        if quant.tensors().has(Tensor::CodesColumnwise) {
            wrong += self.wrong_along_columns(norm, quant, add)?;
        }
        Ok(wrong)
    }

    /// Codes and scales along columns, of the first block of rows.
    fn wrong_along_columns(&self, norm: Norm, quant: Quant, add: bool) -> Result<usize, Error> {
        let Shape { rows: count, cols } = self.shape;
        let along = quant.spec(self.shape).columnwise();
        let (Some(height), Some(groups)) = (along.scale.set_cols(count), along.scale.groups(count)) else {
            return Ok(0);
        };
        let rows = 0..height.min(count);
        let elements = self.elements(&rows);
        let arithmetic = self.device.arithmetic();
        let rstd = self.device.download(&self.rstd)?;
        let (weight, bias) = (self.vector(tensors::WEIGHT), self.vector(tensors::BIAS));
        let (x, residual) = (self.values(tensors::X, &elements), self.values(tensors::SECOND, &elements));
        let stored = if add { self.part(&self.sets[0].residual_out, elements)? } else { Vec::new() };
        let inputs = ForwardInputs {
            x: &x,
            residual: add.then_some((&*residual, T::DTYPE)),
            weight: Some(&weight),
            bias: (norm == Norm::Layer).then_some(&*bias),
        };
        let spec = spec(norm, Shape { rows: rows.len(), cols });
        let h = add.then(|| exact(&stored));
        let truth = ForwardTruth::new(&spec, inputs, T::DTYPE, h.as_deref(), worst(&arithmetic));
        let rstd = Bits::of(&rstd[rows.clone()]);
        let given = Given { scale: f64::from(GIVEN_SCALE), amax: 0.0 };
        // As if these rows were all, with scales column by column.
        let alone = quant.spec(self.shape).layout(ScaleLayout::RowMajor).columnwise_layout(ScaleLayout::RowMajor);
        let truth = QuantizedTruth::new(&spec, alone, given, &truth, (T::DTYPE, Some(&rstd)), &arithmetic).columnwise();
        let places: Vec<usize> = (0..cols).map(|col| along.layout.index(groups, col, 0)).collect();
        let scales = match along.scale_type() {
            ScaleType::F32 => {
                let scales = self.device.download(&self.scales_along)?;
                Bits::of(&places.iter().map(|&place| scales[place]).collect::<Vec<_>>())
            }
            ScaleType::E8m0 => {
                let scales = self.device.download(&self.scale_bytes_along)?;
                Bits::of(&places.iter().map(|&place| scales[place]).collect::<Vec<_>>())
            }
        };
        let codes = self.device.download(&self.sets[0].codes_t)?;
        let codes: Vec<_> = codes.chunks(count).flat_map(|column| column[..rows.len()].iter().copied()).collect();
        Ok(failures(&truth.judge_scales(&scales)) + failures(&truth.judge_codes(&Bits::of(&codes), Some(&scales))))
    }

    fn wrong_in_backward(&self, operation: Operation) -> Result<usize, Error> {
        let arithmetic = self.device.arithmetic();
        let statistics = self.statistics(operation.norm)?;
        let weight = self.vector(tensors::WEIGHT);
        // A NaN that backward is given excuses a NaN that it gives.
        let mut wrong = statistics.rstd.iter().chain(&statistics.mean).filter(|value| !value.is_finite()).count();
        for rows in self.judged_rows() {
            let elements = self.elements(&rows);
            let (dy, x) = (self.values(tensors::SECOND, &elements), self.values(tensors::X, &elements));
            let (mean, rstd) = (&statistics.mean[rows.clone()], &statistics.rstd[rows.clone()]);
            let inputs = BackwardInputs { dy: &dy, x: &x, weight: Some(&weight), mean, rstd, dresidual_out: None };
            let spec = spec(operation.norm, Shape { rows: rows.len(), ..self.shape });
            let truth = BackwardTruth::new(&spec, &inputs, Statistics::Given, operation.reduction, worst(&arithmetic));
            wrong += failures(&truth.judge(Tensor::Dx, &self.part(&self.sets[0].out, elements)?));
        }
        Ok(wrong + self.wrong_in_columns(operation, &statistics)?)
    }

    /// The sums over all rows, in columns from the first to the last at even distances. A column's sum depends on no
    /// other column once the statistics are given, so the columns are judged as if they were all there are.
    fn wrong_in_columns(&self, operation: Operation, statistics: &Saved) -> Result<usize, Error> {
        let Shape { rows, cols } = self.shape;
        let count = (JUDGED_TERMS / rows).clamp(2, cols.max(2)).min(cols);
        let columns: Vec<usize> = (0..count).map(|i| i * (cols - 1) / (count - 1).max(1)).collect();
        let gather = |tensor| -> Vec<f64> {
            let row = |row| columns.iter().map(move |col| row * cols + col);
            (0..rows).flat_map(row).map(|index| self.pattern.value(tensor, index)).collect()
        };
        let (dy, x) = (gather(tensors::SECOND), gather(tensors::X));
        let Saved { mean, rstd } = statistics;
        let inputs = BackwardInputs { dy: &dy, x: &x, weight: None, mean, rstd, dresidual_out: None };
        let spec = spec(operation.norm, Shape { rows, cols: count });
        let arithmetic = self.device.arithmetic();
        let truth = BackwardTruth::new(&spec, &inputs, Statistics::Given, operation.reduction, worst(&arithmetic));

        let pick = |all: Vec<T>| -> Vec<T> { columns.iter().map(|&col| all[col]).collect() };
        let dweight = pick(self.device.download(&self.dweight)?);
        let mut wrong = failures(&truth.judge(Tensor::Dweight, &dweight));
        if operation.norm == Norm::Layer {
            let dbias = pick(self.device.download(&self.dbias)?);
            wrong += failures(&truth.judge(Tensor::Dbias, &dbias));
        }
        Ok(wrong)
    }

    /// The statistics that backward was given: zeros for the mean of an RMS norm.
    fn statistics(&self, norm: Norm) -> Result<Saved, Error> {
        let wide = |values: Vec<f32>| values.into_iter().map(f64::from).collect();
        let mean = match norm {
            Norm::Rms => vec![0.0; self.shape.rows],
            Norm::Layer => wide(self.device.download(&self.mean)?),
        };
        Ok(Saved { mean, rstd: wide(self.device.download(&self.rstd)?) })
    }

    fn vector(&self, tensor: usize) -> Vec<f64> {
        self.values(tensor, &(0..self.shape.cols))
    }

    fn values(&self, tensor: usize, elements: &Range<usize>) -> Vec<f64> {
        elements.clone().map(|index| self.pattern.value(tensor, index)).collect()
    }

    /// Some elements of a buffer. All of a large one would take longer than what is measured.
    fn part(&self, buffer: &D::Buffer<T>, elements: Range<usize>) -> Result<Vec<T>, Error> {
        let len = elements.len();
        let mut part = self.nan::<T>(len)?;
        self.device.copy(self.device.view(buffer, elements), self.device.view_mut(&mut part, 0..len), 0)?;
        self.device.download(&part)
    }
}

/// Of all rows.
struct Saved {
    mean: Vec<f64>,
    rstd: Vec<f64>,
}

const fn worst(arithmetic: &Arithmetic) -> Model<'_> {
    Model { arithmetic, mode: Mode::Worst }
}

/// Elements outside their bounds. Inputs are finite and small: of every element something is due.
const fn failures(verdict: &Verdict) -> usize {
    verdict.failures + verdict.open
}

#[cfg(test)]
mod tests {
    use super::*;
    use rmsnorm_core::conformance::Harness;
    use rmsnorm_core::cpu::CpuBackend;
    use rmsnorm_core::{GradReduction, bf16, f16};

    fn operations() -> Vec<Operation> {
        Operation::product(&Norm::ALL, &Op::all(), &[GradReduction::Partials])
    }

    type OnCpu<'a, T> = Workload<'a, CpuBackend, T>;

    fn workload<T: Element>(backend: &CpuBackend, rows: usize, cols: usize) -> Result<OnCpu<'_, T>, Error> {
        Workload::new(backend, Shape { rows, cols }, &operations())
    }

    #[test]
    fn every_operation_is_within_its_bounds() {
        let backend = CpuBackend::new();
        for (rows, cols) in [(1, 1), (1, 100), (20, 100), (40, 33), (3000, 7)] {
            let mut workloads = (
                workload::<f32>(&backend, rows, cols).unwrap(),
                workload::<f16>(&backend, rows, cols).unwrap(),
                workload::<bf16>(&backend, rows, cols).unwrap(),
            );
            for operation in operations() {
                let wrong = [
                    workloads.0.wrong_elements(operation).unwrap(),
                    workloads.1.wrong_elements(operation).unwrap(),
                    workloads.2.wrong_elements(operation).unwrap(),
                ];
                assert_eq!(wrong, [0; 3], "{operation:?} {rows}x{cols}");
            }
        }
    }

    /// The judge as it is called after an operation, on the results of no operation at all.
    #[test]
    fn what_is_not_written_is_wrong() {
        let backend = CpuBackend::new();
        let mut workload = workload::<bf16>(&backend, 100, 10).unwrap();
        workload.poison().unwrap();
        let judged = 2 * JUDGED_ROWS;
        assert_eq!(workload.wrong_in_forward(Norm::Rms, false).unwrap(), judged * 10 + judged);
        assert_eq!(workload.wrong_in_forward(Norm::Layer, true).unwrap(), 2 * judged * 10 + 2 * judged);
        for operation in operations().into_iter().filter(|operation| operation.op == Op::Backward) {
            workload.poison().unwrap();
            workload.call(Operation { op: Op::Forward, ..operation }, 0).unwrap();
            workload.poison_rows_of_out().unwrap();
            let sums = if operation.norm == Norm::Layer { 20 } else { 10 };
            assert_eq!(workload.wrong_in_backward(operation).unwrap(), judged * 10 + sums);
        }
    }

    /// Right results of an earlier call do not pass for those of one that writes nothing.
    #[test]
    fn what_an_earlier_call_left_is_wrong() {
        let backend = CpuBackend::new();
        let mut workload = workload::<f32>(&backend, 20, 100).unwrap();
        for operation in operations() {
            assert_eq!(workload.wrong_elements(operation).unwrap(), 0);
            // All 20 rows are judged. Backward gets its statistics.
            let all_but_this = |workload: &mut OnCpu<'_, f32>, made: Operation| {
                if made.op == operation.op { Ok(()) } else { workload.call(made, 0) }
            };
            let wrong = workload.wrong_after(operation, all_but_this).unwrap();
            assert!(wrong >= 20 * 100, "{operation:?}: {wrong}");
        }
    }

    /// NaN in the statistics that backward is given excuses no NaN in its results.
    #[test]
    fn statistics_that_are_not_numbers_are_wrong() {
        let backend = CpuBackend::new();
        let mut workload = workload::<f32>(&backend, 20, 100).unwrap();
        for operation in operations().into_iter().filter(|operation| operation.op == Op::Backward) {
            let backward_alone = |workload: &mut OnCpu<'_, f32>, made: Operation| {
                if made.op == Op::Backward { workload.call(made, 0) } else { Ok(()) }
            };
            let wrong = workload.wrong_after(operation, backward_alone).unwrap();
            assert!(wrong >= 20, "{operation:?}: {wrong}");
        }
    }

    #[test]
    fn every_way_to_copy_copies_every_element() {
        let backend = CpuBackend::new();
        for (rows, cols) in [(1, 1), (3, 7), (100, 1031), (1500, 2049)] {
            assert_eq!(workload::<f32>(&backend, rows, cols).unwrap().wrong_copies().unwrap(), 0, "{rows}x{cols}");
            assert_eq!(workload::<bf16>(&backend, rows, cols).unwrap().wrong_copies().unwrap(), 0, "{rows}x{cols}");
        }
    }

    #[test]
    fn elements_that_are_not_copied_are_counted() {
        let backend = CpuBackend::new();
        let mut workload = workload::<f16>(&backend, 10, 10).unwrap();
        workload.sets[0].out = workload.nan(100).unwrap();
        assert_eq!(workload.not_copied(0).unwrap(), 100);
        let mut last = backend.download(&workload.sets[0].x).unwrap();
        last[99] = f16::NAN;
        workload.sets[0].out = backend.upload(&last).unwrap();
        assert_eq!(workload.not_copied(0).unwrap(), 1);
        workload.sets[0].out = backend.upload(&last[..99]).unwrap();
        assert_eq!(workload.not_copied(0).unwrap(), 1);
    }

    /// Each set in turn, and no other: a copy of the same set again would find it in the cache.
    #[test]
    fn a_copy_is_of_the_set_that_is_asked_for() {
        let backend = CpuBackend::new();
        let mut workload = workload::<f32>(&backend, 128, 256).unwrap();
        let count = workload.sets.len();
        assert!(count > 2, "{count}");
        for set in [0, 1, count - 1] {
            for way in 0..CpuBackend::COPIES {
                for set in &mut workload.sets {
                    set.out = backend.upload(&[f32::NAN; 128 * 256]).unwrap();
                }
                workload.copy(set + count, way).unwrap();
                for other in [0, 1, count - 1] {
                    let expected = if other == set { 0 } else { 128 * 256 };
                    assert_eq!(workload.not_copied(other).unwrap(), expected, "set {set}, way {way}");
                }
            }
        }
    }

    #[test]
    fn norms_are_told_apart() {
        let backend = CpuBackend::new();
        let mut workload = workload::<f32>(&backend, 2, 100).unwrap();
        let layer = Operation { norm: Norm::Layer, op: Op::Forward, reduction: GradReduction::Partials };
        workload.poison().unwrap();
        workload.call(layer, 0).unwrap();
        assert_eq!(workload.wrong_in_forward(Norm::Layer, false).unwrap(), 0);
        assert!(workload.wrong_in_forward(Norm::Rms, false).unwrap() > 100, "a layer norm is no RMS norm");
    }

    #[test]
    fn a_row_that_is_missing_from_the_sums_is_seen() {
        let backend = CpuBackend::new();
        let [rows, cols] = [500, 12];
        let whole = Operation { norm: Norm::Layer, op: Op::Backward, reduction: GradReduction::Partials };
        let mut workload = workload::<f32>(&backend, rows, cols).unwrap();
        assert_eq!(workload.wrong_elements(whole).unwrap(), 0);
        let statistics = workload.statistics(whole.norm).unwrap();
        // The same sums, but of all rows less the last.
        workload.shape.rows = rows - 1;
        workload.call(whole, 0).unwrap();
        workload.shape.rows = rows;
        assert_eq!(workload.wrong_in_columns(whole, &statistics).unwrap(), 2 * cols);
    }

    #[test]
    fn judged_rows_are_both_ends_and_none_twice() {
        let backend = CpuBackend::new();
        let ends = [(1, [0..1, 1..1]), (16, [0..16, 16..16]), (20, [0..16, 16..20]), (99, [0..16, 83..99])];
        for (rows, expected) in ends {
            assert_eq!(workload::<f32>(&backend, rows, 3).unwrap().judged_rows(), expected);
        }
    }
}
