//! Forward, forward with a residual, and backward, as criterion groups:
//! `forward/rms_norm/bf16/4096x1024/cpu`.
//!
//! The last part of an id is the backend, so a group compares backends at one shape. Throughput
//! counts the fewest bytes that must move. Operations, tensors, timers and the check before timing
//! are the same as in `rmsnorm bench`, which also prints the copy bandwidth. Criterion adds
//! statistics and compares with an earlier run.
#![expect(clippy::expect_used, reason = "a benchmark that cannot run has nothing better to do than to stop")]

use std::time::Duration;

use criterion::{Criterion, Throughput};
use rmsnorm_bench::{Form, Measurable, Measurement, Op, Operation, Shape, Workload, workload_bytes};
use rmsnorm_core::{AnyBackend, DType, GradReduction, Norm, available};

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    for entry in available() {
        match entry.status {
            Err(reason) => eprintln!("{}: skipped: {reason}", entry.device),
            Ok(_) => {
                let backend = AnyBackend::open(entry.device).expect("it could be opened before");
                let name = &entry.device.to_string();
                rmsnorm_bench::measure(&backend, Bench { criterion: &mut criterion, name }).expect("the device works");
            }
        }
    }
    criterion.final_summary();
}

/// Every shape, dtype, operation and norm on one backend.
struct Bench<'a> {
    criterion: &'a mut Criterion,
    /// The device's name.
    name: &'a str,
}

impl Measurement for Bench<'_> {
    type Output = ();

    fn run<D: Measurable>(self, device: &D) {
        for &shape in D::SHAPES {
            for dtype in DType::ALL {
                bench(self.criterion, self.name, device, (shape, dtype));
            }
        }
    }
}

/// Every operation and norm on one backend, in one dtype and shape.
fn bench<D: Measurable>(criterion: &mut Criterion, name: &str, device: &D, (shape, dtype): (Shape, DType)) {
    let operations = Operation::product(&Norm::USUAL, &Op::USUAL, &[Form::Plain], &[GradReduction::default()]);
    if let Err(rule) = device.admit(shape, workload_bytes(device, shape, dtype, &operations)) {
        eprintln!("{} {shape}: skipped: {rule}", name);
        return;
    }
    // Made by the first benchmark that the filter selects, since the tensors are large.
    let mut workload = None;
    for op in Op::USUAL {
        for norm in Norm::USUAL {
            let operation = Operation::new(norm, op);
            let mut group = criterion.benchmark_group(operation.id(dtype, shape));
            group.throughput(Throughput::Bytes(operation.bytes(dtype, shape) as u64));
            let (mut batch, mut set) = (None, 0);
            group.bench_function(name, |bencher| {
                let workload = workload.get_or_insert_with(|| {
                    Workload::new(device, shape, dtype, &operations).expect("the device has room for the tensors")
                });
                let batch = batch.get_or_insert_with(|| {
                    let wrong = workload.wrong_elements(operation).expect("the call is valid");
                    assert_eq!(wrong, 0, "elements of {operation:?} are outside their bounds");
                    let sets = workload.sets();
                    device
                        .make_batch(sets, &mut |device, set| workload.call_on(device, operation, set))
                        .expect("the call is valid")
                });
                bencher.iter_custom(|calls| {
                    let sets = set..set + calls as usize;
                    set = sets.end;
                    let seconds = device.time(batch, sets, &mut |device, set| workload.call_on(device, operation, set));
                    Duration::from_secs_f64(seconds.expect("the call is valid") * calls as f64)
                });
            });
            group.finish();
        }
    }
}
