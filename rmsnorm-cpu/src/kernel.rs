//! The stage bodies. Each is compiled once per instruction set; the bodies of common calls also
//! once per dtype of activations and residual stream. Only this module selects a body.
//!
//! They are compiled in this crate, so that they are fast in a caller's debug build: the functions
//! that callers use are not generic.

use rmsnorm_spec::quant::QuantSpec;
use rmsnorm_spec::{DType, DTypes, bf16, f16};

use crate::caps::Isa;
use crate::lanes::Any;
use crate::stages::Stage;
use crate::stages::backward::BackwardBlocks;
use crate::stages::columns::{ColumnsRows, SumsBlocks};
use crate::stages::columnwise::ColumnwiseCols;
use crate::stages::copy::CopyRange;
use crate::stages::forward::ForwardRows;
use crate::stages::forward::after::AfterRows;
use crate::stages::forward::parts::PartsRows;
use crate::stages::quantized_forward::QuantizedRows;
use crate::stages::reduce_partials::PartialRows;

/// An instruction set with a body per dtype for the common stages.
#[derive(Clone, Copy)]
enum Wide {
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// The instructions of the target, on architectures without another set here.
    #[cfg(not(target_arch = "x86_64"))]
    Target,
}

impl Wide {
    fn of(isa: Isa) -> Option<Self> {
        #[cfg(target_arch = "x86_64")]
        match isa {
            Isa::Portable => None,
            Isa::Avx2 => Some(Wide::Avx2),
            Isa::Avx512 => Some(Wide::Avx512),
        }
        #[cfg(not(target_arch = "x86_64"))]
        match isa {
            Isa::Portable | Isa::Avx2 | Isa::Avx512 => Some(Wide::Target),
        }
    }

    /// Runs a stage. The closure makes the stage inside the body, because moving it would cost a
    /// call of one row tens of nanoseconds.
    fn run<W: Stage>(self, work: impl FnOnce() -> W) {
        let _ieee = IeeeMode::enter();
        match self {
            #[cfg(target_arch = "x86_64")]
            Wide::Avx2 => {
                // SAFETY:
                // - feature: a backend holds an `Isa` only if `Isa::is_available` said yes.
                unsafe { avx2::run(work) }
            }
            #[cfg(target_arch = "x86_64")]
            Wide::Avx512 => {
                // SAFETY:
                // - feature: a backend holds an `Isa` only if `Isa::is_available` said yes.
                unsafe { avx512::run(work) }
            }
            #[cfg(not(target_arch = "x86_64"))]
            Wide::Target => portable::run(work()),
        }
    }
}

// One module per instruction set, so that they are compiled in parallel.

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use crate::lanes::Avx2;
    use crate::stages::Stage;

    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) unsafe fn run<W: Stage>(work: impl FnOnce() -> W) {
        work().run::<Avx2>();
    }
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use crate::lanes::Avx512;
    use crate::stages::Stage;

    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
    pub(super) unsafe fn run<W: Stage>(work: impl FnOnce() -> W) {
        work().run::<Avx512>();
    }
}

mod portable {
    use crate::lanes::Portable;
    use crate::stages::Stage;

    pub(super) fn run(mut work: impl Stage) {
        work.run::<Portable>();
    }
}

/// Runs a stage with the instructions that the target guarantees.
fn run_portable(work: impl Stage) {
    let _ieee = IeeeMode::enter();
    portable::run(work);
}

/// Runs a stage in a body for all dtypes.
fn run_any(isa: Isa, work: impl Stage) {
    match Wide::of(isa) {
        Some(wide) => wide.run(|| work),
        None => run_portable(work),
    }
}

/// Runs a stage in a body for the dtypes of activations and residual stream. The weight's dtype is
/// tested at run time, which takes no measurable time.
macro_rules! run_mix {
    ($isa:expr, $work:expr, $dtypes:expr) => {{
        let DTypes { activation, residual, .. } = $dtypes;
        let (isa, work) = ($isa, $work);
        match (Wide::of(isa), activation, residual) {
            (None, DType::F32, _) => run_portable(work.known::<f32, f32, f32>()),
            (None, ..) => run_portable(work),
            (Some(wide), DType::F32, _) => wide.run(|| work.known::<f32, f32, f32>()),
            (Some(wide), DType::F16, DType::F32) => wide.run(|| work.known::<f16, Any, f32>()),
            (Some(wide), DType::F16, _) => wide.run(|| work.known::<f16, Any, f16>()),
            (Some(wide), DType::Bf16, DType::F32) => wide.run(|| work.known::<bf16, Any, f32>()),
            (Some(wide), DType::Bf16, _) => wide.run(|| work.known::<bf16, Any, bf16>()),
        }
    }};
}

/// Forward.
pub(crate) fn forward(isa: Isa, work: &mut ForwardRows<'_>) {
    run_mix!(isa, work, work.dtypes);
}

/// The first stage of backward: dx, and the partial sums of weight gradients.
pub(crate) fn backward(isa: Isa, work: &mut BackwardBlocks<'_>) {
    run_mix!(isa, work, work.dtypes);
}

/// Forward to codes.
pub(crate) fn quantized_forward(isa: Isa, work: &mut QuantizedRows<'_>) {
    run_mix!(isa, work, work.forward.dtypes);
}

/// Forward with a residual that is added after the norm.
pub(crate) fn after(isa: Isa, work: &mut AfterRows<'_>) {
    run_mix!(isa, work, work.rows.dtypes);
}

/// Forward of the sum of several parts.
pub(crate) fn parts(isa: Isa, work: &mut PartsRows<'_>) {
    run_any(isa, work);
}

/// Either phase of a forward call on a rank's columns.
pub(crate) fn columns(isa: Isa, work: &mut ColumnsRows<'_>) {
    run_any(isa, work);
}

/// The first phase of a backward call on a rank's columns.
pub(crate) fn sums(isa: Isa, work: &mut SumsBlocks<'_>) {
    run_any(isa, work);
}

/// The columnwise copy of codes.
pub(crate) fn columnwise(isa: Isa, work: &mut ColumnwiseCols<'_>) {
    run_any(isa, work);
}

/// The second stage of the weight gradients.
pub(crate) fn reduce_partials(isa: Isa, work: &mut PartialRows<'_>) {
    run_any(isa, work);
}

/// Copies a range.
pub(crate) fn copy(isa: Isa, work: &mut CopyRange<'_>) {
    run_any(isa, work);
}

/// The scale of a tensor, in the floating-point mode of the stages.
#[inline(never)]
pub(crate) fn scale(quant: &QuantSpec, amax: f32) -> f32 {
    let _ieee = IeeeMode::enter();
    std::hint::black_box(quant).scale(std::hint::black_box(amax))
}

/// Sets rounding to nearest and gradual underflow until it is dropped. Audio and game code flushes
/// subnormals on its threads, and results must not depend on the thread.
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
