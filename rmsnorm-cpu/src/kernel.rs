//! The stage bodies, compiled once per mix of dtypes and instruction set. The only place that chooses one.
//!
//! They are compiled here and not in the caller's crate, so that they are as fast in a caller's debug build: no
//! function below is generic but the look-ups.

use rmsnorm_spec::quant::QuantSpec;
use rmsnorm_spec::{Element, bf16, f16};

use crate::caps::Isa;
use crate::stages::backward::BackwardBlocks;
use crate::stages::columns::{ColumnsRows, SumsBlocks};
use crate::stages::columnwise::ColumnwiseCols;
use crate::stages::copy::CopyRange;
use crate::stages::forward::ForwardRows;
use crate::stages::forward::after::AfterRows;
use crate::stages::forward::parts::PartsRows;
use crate::stages::quantized_forward::QuantizedRows;
use crate::stages::reduce_partials::PartialRows;

/// Runs a stage's work on an instruction set that this processor has.
pub(crate) type Kernel<Work> = fn(Isa, Work);

/// For one stage and one mix of dtypes: the body per instruction set, and the choice among them.
macro_rules! stage {
    ($stage:ident, $work:ty) => {
        pub(super) mod $stage {
            use super::*;
            use crate::lanes::{Avx2, Avx512, Portable};

            pub(in super::super) fn run(isa: Isa, work: $work) {
                let _ieee = IeeeMode::enter();
                match isa {
                    Isa::Portable => work.run::<Portable>(),
                    Isa::Avx2 => {
                        // SAFETY:
                        // - feature: a backend holds an `Isa` only if `Isa::is_available` said yes.
                        unsafe { avx2(work) }
                    }
                    Isa::Avx512 => {
                        // SAFETY:
                        // - feature: a backend holds an `Isa` only if `Isa::is_available` said yes.
                        unsafe { avx512(work) }
                    }
                }
            }

            #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
            unsafe fn avx2(work: $work) {
                work.run::<Avx2>();
            }

            #[cfg_attr(
                target_arch = "x86_64",
                target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")
            )]
            unsafe fn avx512(work: $work) {
                work.run::<Avx512>();
            }
        }
    };
}

/// The mixes of dtypes: activations, weight, residual.
macro_rules! mixes {
    ($($mix:ident: $t:ty, $w:ty, $r:ty;)*) => {
        $(mod $mix {
            use super::*;
            stage!(forward, ForwardRows<'_, $t, $w, $r>);
            stage!(after, AfterRows<'_, $t, $w, $r>);
            stage!(parts, PartsRows<'_, $t, $w, $r>);
            stage!(columns, ColumnsRows<'_, $t, $w, $r>);
            stage!(backward, BackwardBlocks<'_, $t, $w, $r>);
            stage!(sums, SumsBlocks<'_, $t, $w, $r>);
            stage!(quantized_forward, QuantizedRows<'_, $t, $w, $r>);
            stage!(columnwise, ColumnwiseCols<'_, $t, $w, $r>);
        })*

        /// The forward kernel of a mix of dtypes, if there is one.
        pub(crate) fn forward<'a, T: Element, W: Element, R: Element>() -> Option<Kernel<ForwardRows<'a, T, W, R>>> {
            match (T::DTYPE, W::DTYPE, R::DTYPE) {
                $((<$t>::DTYPE, <$w>::DTYPE, <$r>::DTYPE) => Some(|isa, work| $mix::forward::run(isa, work.cast())),)*
                _ => None,
            }
        }

        /// The kernel of a residual that is added after the norm, of a mix of dtypes, if there is one.
        pub(crate) fn after<'a, T: Element, W: Element, R: Element>() -> Option<Kernel<AfterRows<'a, T, W, R>>> {
            match (T::DTYPE, W::DTYPE, R::DTYPE) {
                $((<$t>::DTYPE, <$w>::DTYPE, <$r>::DTYPE) => Some(|isa, work| $mix::after::run(isa, work.cast())),)*
                _ => None,
            }
        }

        /// The kernel of the sum of several parts, of a mix of dtypes, if there is one.
        pub(crate) fn parts<'a, T: Element, W: Element, R: Element>() -> Option<Kernel<PartsRows<'a, T, W, R>>> {
            match (T::DTYPE, W::DTYPE, R::DTYPE) {
                $((<$t>::DTYPE, <$w>::DTYPE, <$r>::DTYPE) => Some(|isa, work| $mix::parts::run(isa, work.cast())),)*
                _ => None,
            }
        }

        /// The kernel of either half of a forward call on a rank's columns, of a mix of dtypes, if there is one.
        pub(crate) fn columns<'a, T: Element, W: Element, R: Element>() -> Option<Kernel<ColumnsRows<'a, T, W, R>>> {
            match (T::DTYPE, W::DTYPE, R::DTYPE) {
                $((<$t>::DTYPE, <$w>::DTYPE, <$r>::DTYPE) => Some(|isa, work| $mix::columns::run(isa, work.cast())),)*
                _ => None,
            }
        }

        /// The kernel of the first half of a backward call on a rank's columns, of a mix of dtypes, if there is one.
        pub(crate) fn sums<'a, T: Element, W: Element, R: Element>() -> Option<Kernel<SumsBlocks<'a, T, W, R>>> {
            match (T::DTYPE, W::DTYPE, R::DTYPE) {
                $((<$t>::DTYPE, <$w>::DTYPE, <$r>::DTYPE) => Some(|isa, work| $mix::sums::run(isa, work.cast())),)*
                _ => None,
            }
        }

        /// The quantized forward kernel of a mix of dtypes, if there is one.
        pub(crate) fn quantized_forward<'a, T: Element, W: Element, R: Element>()
        -> Option<Kernel<QuantizedRows<'a, T, W, R>>> {
            match (T::DTYPE, W::DTYPE, R::DTYPE) {
                $((<$t>::DTYPE, <$w>::DTYPE, <$r>::DTYPE) => {
                    Some(|isa, work| $mix::quantized_forward::run(isa, work.cast()))
                })*
                _ => None,
            }
        }

        /// The kernel of the copy along columns of a mix of dtypes, if there is one.
        pub(crate) fn columnwise<'a, T: Element, W: Element, R: Element>() -> Option<Kernel<ColumnwiseCols<'a, T, W, R>>>
        {
            match (T::DTYPE, W::DTYPE, R::DTYPE) {
                $((<$t>::DTYPE, <$w>::DTYPE, <$r>::DTYPE) => {
                    Some(|isa, work| $mix::columnwise::run(isa, work.cast()))
                })*
                _ => None,
            }
        }

        /// The backward kernel of a mix of dtypes, if there is one.
        pub(crate) fn backward<'a, T: Element, W: Element, R: Element>() -> Option<Kernel<BackwardBlocks<'a, T, W, R>>> {
            match (T::DTYPE, W::DTYPE, R::DTYPE) {
                $((<$t>::DTYPE, <$w>::DTYPE, <$r>::DTYPE) => Some(|isa, work| $mix::backward::run(isa, work.cast())),)*
                _ => None,
            }
        }
    };
}

mixes! {
    f32_f32_f32: f32, f32, f32;
    f16_f16_f16: f16, f16, f16;
    f16_f16_f32: f16, f16, f32;
    f16_f32_f16: f16, f32, f16;
    f16_f32_f32: f16, f32, f32;
    bf16_bf16_bf16: bf16, bf16, bf16;
    bf16_bf16_f32: bf16, bf16, f32;
    bf16_f32_bf16: bf16, f32, bf16;
    bf16_f32_f32: bf16, f32, f32;
}

/// The dtypes of a weight gradient.
macro_rules! gradients {
    ($($gradient:ident: $w:ty;)*) => {
        $(mod $gradient {
            use super::*;
            stage!(reduce_partials, PartialRows<'_, $w>);
        })*

        /// The second stage of the weight gradients.
        pub(crate) fn reduce_partials<W: Element>(isa: Isa, work: PartialRows<'_, W>) {
            match W::DTYPE {
                $(<$w>::DTYPE => $gradient::reduce_partials::run(isa, work.cast()),)*
            }
        }
    };
}

gradients! {
    gradient_f32: f32;
    gradient_f16: f16;
    gradient_bf16: bf16;
}

mod bits {
    use super::*;
    stage!(copy, CopyRange<'_>);
}

/// Copies a range.
pub(crate) fn copy(isa: Isa, work: CopyRange<'_>) {
    bits::copy::run(isa, work);
}

/// The scale of a tensor, in the arithmetic of the stages.
#[inline(never)]
pub(crate) fn scale(quant: &QuantSpec, amax: f32) -> f32 {
    let _ieee = IeeeMode::enter();
    std::hint::black_box(quant).scale(std::hint::black_box(amax))
}

/// Rounding to nearest and gradual underflow, for as long as it lives: audio and game code flushes subnormals on its
/// threads, and results must not depend on the thread that computes them.
struct IeeeMode {
    #[cfg(target_arch = "x86_64")]
    caller: u32,
}

#[cfg(target_arch = "x86_64")]
impl IeeeMode {
    /// All exceptions masked, round to nearest, no flush to zero, no denormals as zero.
    const DEFAULT: u32 = 0x1f80;

    fn enter() -> Self {
        let mut caller = 0;
        // SAFETY:
        // - features: stmxcsr and ldmxcsr are part of SSE, which x86-64 guarantees;
        // - memory: each accesses the one u32 it is given;
        // - state: DEFAULT is the floating-point environment that Rust assumes.
        unsafe {
            // Without `readonly` and `preserves_flags`: arithmetic must not move across the change of mode.
            std::arch::asm!("stmxcsr [{}]", in(reg) &raw mut caller, options(nostack));
            std::arch::asm!("ldmxcsr [{}]", in(reg) &Self::DEFAULT, options(nostack));
        }
        IeeeMode { caller }
    }
}

#[cfg(target_arch = "x86_64")]
impl Drop for IeeeMode {
    fn drop(&mut self) {
        // SAFETY:
        // - features: ldmxcsr is part of SSE, which x86-64 guarantees;
        // - memory: it reads the one u32 it is given;
        // - state: the value is the one that `enter` found.
        unsafe {
            std::arch::asm!("ldmxcsr [{}]", in(reg) &self.caller, options(nostack));
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
impl IeeeMode {
    fn enter() -> Self {
        IeeeMode {}
    }
}
