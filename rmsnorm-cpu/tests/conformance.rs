//! The conformance suite on every instruction set, on two threads, because splitting the rows must
//! not change results.

use rmsnorm_cpu::{CpuBackend, Isa};

mod portable {
    rmsnorm_conformance::conformance!(super::CpuBackend::with_isa_and_threads(super::Isa::Portable, 2));
}

mod avx2 {
    rmsnorm_conformance::conformance!(super::CpuBackend::with_isa_and_threads(super::Isa::Avx2, 2));
}

mod avx512 {
    rmsnorm_conformance::conformance!(super::CpuBackend::with_isa_and_threads(super::Isa::Avx512, 2));
}
