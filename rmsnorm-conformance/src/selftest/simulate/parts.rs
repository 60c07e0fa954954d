//! The sum of several parts: math.md, equation (1'), in f32.

use rmsnorm_spec::{DType, Element, Parts, Rows, Source};

use super::call::Call;
use super::matrix::{Matrix, round};
use crate::selftest::planted::Bug;

/// The parts of x, each with its rows.
pub(super) struct SumOfParts<'a, T> {
    parts: Vec<Matrix<&'a [T]>>,
}

impl<'a, T: Element> SumOfParts<'a, T> {
    /// Of an x that has several.
    pub(super) fn of<O>(call: &Call, x: &Source<&'a [T], O>, parts: Option<Parts>) -> Option<Self> {
        let Source::Read(rows) = x else { return None };
        let Parts { count, stride } = parts.filter(|parts| parts.count > 1)?;
        let stride = if call.has(Bug::PartsDense) { call.spec.rows * call.spec.cols } else { stride };
        let part = |part: usize| {
            let first = (part * stride).min(rows.view.len());
            let mut of_part = Rows::dense(&rows.view[first..]);
            (of_part.row_stride, of_part.groups) = (rows.row_stride, rows.groups);
            Matrix::new(of_part, call, [Bug::XStrideIgnored, Bug::XGroupsIgnored])
        };
        Some(SumOfParts { parts: (0..count).map(part).collect() })
    }

    /// What is normalized of a row, and what is stored: the same sum in a correct kernel.
    pub(super) fn sum(&self, call: &Call, row: usize, residual: Option<&[f32]>) -> (Vec<f32>, Vec<f32>) {
        let mut parts: Vec<Vec<f32>> = self.parts.iter().map(|part| part.row(row)).collect();
        if call.has(Bug::PartMissing) {
            parts.truncate(parts.len() - 1);
        }
        if call.has(Bug::PartTwice) {
            parts.push(parts[0].clone());
        }
        if call.has(Bug::PartsReversed) {
            parts.reverse();
        }
        let residual = residual.filter(|_| !(call.has(Bug::ResidualOfLastPart) && self.parts.len() > 2));
        let activation = call.problem.dtypes.activation;
        let sum_of = |col: usize| {
            let values: Vec<f32> = parts.iter().map(|part| part[col]).collect();
            let addend = residual.map(|residual| residual[col]);
            if call.has(Bug::PartsInF64) {
                let sum: f64 = values.iter().chain(&addend).map(|value| f64::from(*value)).sum();
                return sum as f32;
            }
            if call.has(Bug::ResidualFirst) {
                return addend.iter().chain(&values).copied().reduce(|sum, value| sum + value).unwrap_or(0.0);
            }
            let step = if call.has(Bug::PartsEachRounded) { activation } else { DType::F32 };
            let add = |sum: f32, value: f32| {
                let again = addend.filter(|_| call.has(Bug::ResidualPerPart)).unwrap_or(0.0);
                round(sum + value + again, step)
            };
            let serial = |values: &[f32]| values.iter().copied().reduce(add).unwrap_or(0.0);
            let half = values.len().div_ceil(2);
            let sum = match call.has(Bug::PartsByTree) {
                true => serial(&values[..half]) + serial(&values[half..]),
                false => serial(&values),
            };
            let sum = if call.has(Bug::PartsRounded) { round(sum, activation) } else { sum };
            addend.map_or(sum, |addend| sum + addend)
        };
        let sums: Vec<f32> = (0..call.spec.cols).map(sum_of).collect();
        let rounded: Vec<f32> = sums.iter().map(|&sum| round(sum, call.problem.dtypes.residual)).collect();
        (if call.has(Bug::PartsUnrounded) { sums } else { rounded.clone() }, rounded)
    }
}
