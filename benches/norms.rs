//! Forward, forward with a residual, and backward, as criterion groups: `forward/rms_norm/bf16/4096x1024/cpu`.
//!
//! The last part of an id is the backend, so a group compares backends. Throughput counts the fewest bytes that must
//! move. Operations, tensors and the check before the clock starts are those of `rmsnorm bench`, which also prints the
//! copy bandwidth; criterion adds its statistics and the comparison with an earlier run.
#![expect(clippy::expect_used, reason = "a benchmark that cannot run has nothing better to do than to stop")]

use criterion::{Criterion, Throughput};
use rmsnorm_core::conformance::Harness;
use rmsnorm_core::cpu::CpuBackend;
use rmsnorm_core::measure::{Op, SHAPES, Shape, Workload};
use rmsnorm_core::{Element, Norm, NormBackend, bf16, f16};

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    let cpu = CpuBackend::new();
    for shape in SHAPES {
        bench::<_, f32>(&mut criterion, &cpu, shape);
        bench::<_, f16>(&mut criterion, &cpu, shape);
        bench::<_, bf16>(&mut criterion, &cpu, shape);
    }
    criterion.final_summary();
}

/// Every operation and norm on one backend, in one dtype and shape.
fn bench<H: Harness, T: Element>(criterion: &mut Criterion, harness: &H, shape: Shape) {
    let backend = harness.backend().name();
    // Made by the first benchmark that the filter lets through: the tensors are large.
    let mut workload = None;
    for op in Op::ALL {
        for norm in Norm::ALL {
            let mut group = criterion.benchmark_group(format!("{}/{}/{}/{shape}", op.name(), norm.name(), T::DTYPE));
            group.throughput(Throughput::Bytes(op.bytes(norm, T::DTYPE, shape) as u64));
            let (mut is_judged, mut set) = (false, 0);
            group.bench_function(backend, |bencher| {
                let workload = workload.get_or_insert_with(|| {
                    Workload::<H, T>::new(harness, shape).expect("the device has room for the tensors")
                });
                if !is_judged {
                    assert_eq!(workload.wrong_elements(op, norm).expect("the call is valid"), 0, "{op:?} is wrong");
                    is_judged = true;
                }
                bencher.iter(|| {
                    set += 1;
                    workload.call(op, norm, set).expect("the call is valid");
                });
            });
            group.finish();
        }
    }
}
