//! The only module with `unsafe` code: promises that wgpu cannot check.
#![expect(unsafe_code, reason = "shader modules without run-time checks, and a pipeline cache from disk")]

use wgpu::{Device, PipelineCache, PipelineCacheDescriptor, ShaderModule, ShaderModuleDescriptor, ShaderRuntimeChecks};

/// A module of one of this crate's programs, without wgpu's checks of indexes, loops and divisors.
pub(super) fn module(device: &Device, descriptor: ShaderModuleDescriptor<'_>) -> ShaderModule {
    // SAFETY:
    // - bounds of tensors: matrices and vectors are accessed at `at_TENSOR(row, col)`, statistics
    //   at `params.TENSOR + row` (`source/accessors.rs`). The program has tested `row < rows`, and
    //   either `col < cols` or, with `IS_WHOLE`, its threads own exactly the existing columns
    //   (`key` in `plan.rs`). A binding covers the first to the last element of the rows of its
    //   dispatch (`launch/bindings.rs`), and these lie in the buffer (`launch/tensors.rs`). The
    //   index fits u32 (`plan/ranges.rs`), so a sum that wraps on the way, as group offsets may,
    //   still ends at it. A row plus the rows before it in its group fits u32, or the call is
    //   refused (`launch.rs`);
    // - bounds of the workspace: the length in the plan, which `launch/workspace.rs` checks;
    // - bounds of workgroup arrays: indexes are lanes of the workgroup, below its size for every
    //   subgroup size, or quotients of them; `folded`, which has one element otherwise, is indexed
    //   only if `IS_FOLDED`;
    // - loops: bounded by numbers of Params. The one loop without such a bound is compare-exchange,
    //   which repeats only after a spurious failure or the success of another invocation;
    // - divisors: constants of the program, and numbers of Params that the host sets to at least 1;
    //   `rows_per_group` is at least 2 if the program divides by it, since its key and the number
    //   come from one `Problem`.
    //
    // Tests compare the bits with the checked form, which `WgpuBackend::checked` chooses.
    unsafe { device.create_shader_module_trusted(descriptor, ShaderRuntimeChecks::unchecked()) }
}

/// A pipeline cache that starts with the data saved by an earlier process.
pub(super) fn pipeline_cache(device: &Device, data: Option<&[u8]>) -> PipelineCache {
    let descriptor = PipelineCacheDescriptor { label: Some("rmsnorm"), data, fallback: true };
    // SAFETY:
    // - data: returned by `get_data` for an adapter with the same key and driver. The file name is
    //   a hash of them, and the file holds a hash of its contents (`cache.rs`), so a damaged file
    //   is not used. Anyone who can write to the user's cache folder is trusted, as for every
    //   compiled program in it.
    unsafe { device.create_pipeline_cache(&descriptor) }
}
