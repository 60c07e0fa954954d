//! The copy that benchmark percentages refer to: it copies all elements and changes nothing else.

use rmsnorm_cpu::{CpuBackend, Isa};
use rmsnorm_spec::Error;

const UNTOUCHED: f32 = -1.0;

/// Lengths around a group of lanes, a cache line and one task, at every alignment that f32 can
/// have.
#[test]
fn every_element_is_copied_and_nothing_else() {
    let lens = [0, 1, 15, 16, 17, 31, 32, 33, 47, 48, 63, 64, 65, 1000, (1 << 17) - 1, 1 << 18, (1 << 20) + 37];
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
        for threads in [1, 4] {
            let backend = CpuBackend::with_isa_and_threads(isa, threads).unwrap();
            for len in lens {
                let starts = if len < 2000 { 0..17 } else { 5..6 };
                for start in starts {
                    for streaming in [false, true] {
                        // Values that are exact in f32 and differ from the value of elements that
                        // were not written.
                        let from: Vec<f32> = (0..start + len).map(|i| i as f32).collect();
                        let mut to = vec![UNTOUCHED; len + 40];
                        backend.copy(&from[start..], &mut to[start..start + len], streaming).unwrap();
                        let what = format!("{len} elements from {start} on {backend}, streaming: {streaming}");
                        assert!(to[start..start + len] == from[start..], "{what}");
                        assert!(to[..start].iter().chain(&to[start + len..]).all(|&v| v == UNTOUCHED), "{what}");
                    }
                }
            }
        }
    }
}

#[test]
fn lengths_that_differ_are_refused_and_nothing_is_written() {
    for (from, to) in [(3, 4), (4, 3), (0, 1)] {
        let mut target = vec![UNTOUCHED; to];
        let error = CpuBackend::new().copy(&vec![1.0; from], &mut target, true).unwrap_err();
        assert!(matches!(error, Error::Length { arg: "to", min, max, got } if (min, max, got) == (from, from, to)));
        assert!(target.iter().all(|&value| value == UNTOUCHED));
    }
}
