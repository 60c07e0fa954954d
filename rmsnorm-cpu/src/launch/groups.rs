//! Calls with a gate, with a weight before the norm, with y of another dtype than x, or with groups of columns: each
//! group is a matrix with its own part of the vectors.

use rmsnorm_spec::Slot;

use super::spread;
use crate::backend::CpuBackend;
use crate::kernel;
use crate::lanes::Out;
use crate::plan::Plan;
use crate::stages::backward::{BackwardBlocks, BackwardRows, Given, GivenOfGroup, Gradients, Partials, Sums};
use crate::stages::forward::affine::Vectors;
use crate::stages::forward::after::Store;
use crate::stages::forward::before::Summed;
use crate::stages::forward::statistics::{OfGroup, OfRow, of_group};
use crate::stages::forward::{Rows, Saved};
use crate::stages::gate::{self, Gate, Then};
use crate::stages::scaled::{Pull, Scaled};
use crate::stages::{Call, Matrix, MatrixMut};

/// The norm of one group, and its number of columns.
fn call_of_group(call: Call) -> (Call, usize) {
    let cols = call.spec.cols / call.spec.groups;
    (Call { spec: call.spec.cols(cols).groups(1), ..call }, cols)
}

/// The statistics of every group, in this room.
pub(super) fn statistics<'s>(
    backend: &CpuBackend,
    tasks: usize,
    call: Call,
    (x, residual): (Scaled<'_>, Option<Matrix<'_>>),
    (of_mean, of_rstd): (&'s mut [f32], &'s mut [f32]),
) -> Given<'s> {
    let ((this, cols), groups) = (call_of_group(call), call.spec.groups);
    let (mut mean, mut rstd) = (Out::from(&mut *of_mean), Out::from(&mut *of_rstd));
    for group in 0..groups {
        let first = group * cols;
        let residual = residual.map(|residual| residual.columns(first));
        let work = Rows {
            call: this,
            before: Summed { x: x.columns(first), residual, out: None },
            statistic: OfGroup {
                mean: (mean.len() > 0).then(|| of_group(&mut mean, group, groups)),
                rstd: Some(of_group(&mut rstd, group, groups)),
            },
            affine: Vectors { weight: None, bias: None },
            after: (),
            saved: Saved::default(),
        };
        spread(backend, tasks, call.spec.rows, work, kernel::any);
    }
    Given { mean: (!of_mean.is_empty()).then_some(of_mean), rstd: of_rstd }
}

pub(super) fn forward(
    backend: &CpuBackend,
    tasks: usize,
    work: Rows<'_, Summed<'_, Matrix<'_>>, Store<'_>, OfRow>,
    gate: Option<(Slot, Gate<'_>)>,
) {
    let Rows { call, before: Summed { x, residual, mut out }, mut affine, after: Store { mut y }, mut saved, .. } =
        work;
    let ([gate, gate_after], weight) = (gate::slots(gate), affine.take_first(&call.spec));
    let x = Scaled { of: x, gate, weight };
    let ((this, cols), groups, rows) = (call_of_group(call), call.spec.groups, call.spec.rows);
    for group in 0..groups {
        let first = group * cols;
        let work = Rows {
            call: this,
            before: Summed {
                x: x.columns(first),
                residual: residual.map(|residual| residual.columns(first)),
                out: out.as_mut().map(|out| out.columns(first)),
            },
            statistic: OfGroup {
                mean: saved.mean.as_mut().map(|mean| of_group(mean, group, groups)),
                rstd: saved.rstd.as_mut().map(|rstd| of_group(rstd, group, groups)),
            },
            affine: affine.columns(first, cols),
            after: Then { gate: gate_after.map(|gate| gate.columns(first)), then: Store { y: y.columns(first) } },
            saved: Saved::default(),
        };
        spread(backend, tasks, rows, work, kernel::any);
    }
}

/// Writes the partial sums of each group after those of the group before it.
pub(super) fn backward(
    backend: &CpuBackend,
    plan: &Plan,
    work: BackwardBlocks<'_>,
    gate: Option<(Slot, Gate<'_>)>,
    dgate: Option<MatrixMut<'_>>,
) {
    let BackwardBlocks { rows, block_rows, stream, partials } = work;
    let BackwardRows { call, dy, mut affine, x, given, found } = rows;
    let ([gate, gate_after], weight) = (gate::slots(gate), affine.take_first(&call.spec));
    let (x, dy) = (Scaled { of: x, gate, weight }, Scaled { of: dy, gate: gate_after, weight: None });
    let (mut dgate, mut dgate_after) = if gate.is_some() { (dgate, None) } else { (None, dgate) };
    let Gradients { dresidual_out, mut dx, mut dresidual } = stream;
    let Partials { mut dweight, mut dbias } = partials;
    let ((this, cols), groups) = (call_of_group(call), call.spec.groups);
    for group in 0..groups {
        let first = group * cols;
        let work = BackwardBlocks {
            rows: BackwardRows {
                call: this,
                dy: Pull { of: dy.columns(first), dgate: dgate_after.as_mut().map(|dgate| dgate.columns(first)) },
                affine: affine.columns(first, cols),
                x: Pull { of: x.columns(first), dgate: dgate.as_mut().map(|dgate| dgate.columns(first)) },
                given: GivenOfGroup { all: given, group, groups },
                found,
            },
            block_rows,
            stream: Gradients {
                dresidual_out: dresidual_out.map(|arriving| arriving.columns(first)),
                dx: dx.columns(first),
                dresidual: dresidual.as_mut().map(|dresidual| dresidual.columns(first)),
            },
            partials: Partials {
                dweight: dweight.as_mut().map(|of| sums_of_group(of, group, groups)),
                dbias: dbias.as_mut().map(|of| sums_of_group(of, group, groups)),
            },
        };
        spread(backend, plan.tasks, plan.blocks, work, kernel::any);
    }
}

fn sums_of_group<'s>(all: &'s mut Sums<'_>, group: usize, groups: usize) -> Sums<'s> {
    let len = all.sums.len() / groups;
    Sums { sums: &mut all.sums[group * len..][..len], cols: all.cols / groups }
}
