//! Devices with fewer storage buffers than a program has tensors.

use super::super::Moved;
use super::super::uses::{bound, uses};
use super::*;

/// The tensors that a dispatch shares, as its copies move them: (tensor, elements, f32 in the
/// workspace, whether it is copied to there).
fn moved(steps: &[Step]) -> Vec<(Tensor, Range<u64>, u64, bool)> {
    let moves = steps.iter().map(|step| match step {
        Step::Dispatch(Dispatch { rows, moved: Some(Moved { tensor, first, at, is_input }), .. }) => {
            (*tensor, first + rows.start..first + rows.end, *at, *is_input)
        }
        Step::Dispatch(_) | Step::Zero { .. } => panic!("{step:?}"),
    });
    moves.collect()
}

/// A call that fits is planned as ever. Otherwise a dispatch binds what the device has, and copies
/// surround it: inputs before, statistics after, each with memory of its own.
#[test]
fn tensors_share_a_binding_where_there_are_too_few() {
    let mut sharing = 0;
    for call in Plans::calls() {
        for (rows, cols) in [(1, 1), (300, 96), (40, 8192), (20, 70_000)] {
            let problem = call.problem(rows, cols);
            let layout = layout(&problem, Access::Aligned);
            let many = plan(&problem, &layout, &LAPTOP).expect("a plan");
            for storage_buffers in [6, 8] {
                // Only vectors and statistics share a binding.
                if problem.tensors.intersection(TensorSet::MATRICES).len() >= storage_buffers as usize {
                    continue;
                }
                let caps = Caps { storage_buffers, ..LAPTOP };
                let few = plan(&problem, &layout, &caps).expect("a plan");
                if many.keys().all(|key| bound(&key).len() <= storage_buffers as usize) {
                    let steps = |plan: &Plan| plan.steps.clone();
                    assert!(rows > 300 || steps(&few) == steps(&many), "{call:?}");
                    continue;
                }
                sharing += 1;
                let told = workspace_len(&problem, &caps) as u64;
                assert!(call.direction != Direction::Backward || few.workspace.len <= told, "{call:?} {told}");
                let is_copy = |step: &Step| matches!(step, Step::Dispatch(Dispatch { moved: Some(_), .. }));
                let mut rest = &few.steps[..];
                while let Some(main) = rest.iter().position(|step| !is_copy(step)) {
                    let (before, after) = (&rest[..main], &rest[main + 1..]);
                    let outputs = after.iter().take_while(|step| is_copy(step) && !moved(&[(*step).clone()])[0].3);
                    let outputs = &after[..outputs.count()];
                    rest = &after[outputs.len()..];
                    let Step::Dispatch(dispatch) = &few.steps[few.steps.len() - rest.len() - outputs.len() - 1] else {
                        continue;
                    };
                    let key = &dispatch.key;
                    assert!(bound(key).len() <= storage_buffers as usize, "{key:?}");
                    let shared: Vec<_> = uses(key).into_iter().filter(|used| used.is_shared(key)).collect();
                    assert_eq!(shared.len(), before.len() + outputs.len(), "{key:?}");
                    let moves: Vec<_> = moved(before).into_iter().chain(moved(outputs)).collect();
                    for (used, (tensor, at)) in shared.iter().zip(&dispatch.shared) {
                        assert_eq!(used.tensor, *tensor);
                        let elements = match tensor.shape() == TensorShape::Rows {
                            true => dispatch.rows.clone(),
                            false => 0..cols as u64,
                        };
                        assert!(at + (elements.end - elements.start) <= few.workspace.len);
                        assert!(*at >= many.workspace.len.saturating_sub(3) || many.workspace.len == 0);
                        assert!(moves.contains(&(*tensor, elements, *at, used.is_loaded)), "{tensor} of {moves:?}");
                    }
                    let ends = dispatch.shared.iter().skip(1).map(|(_, at)| *at).chain([few.workspace.len]);
                    assert!(dispatch.shared.iter().zip(ends).all(|((_, at), end)| *at < end), "{dispatch:?}");
                }
                assert!(rest.is_empty(), "{rest:?}");
            }
        }
    }
    assert!(sharing > 100, "{sharing}");
}
