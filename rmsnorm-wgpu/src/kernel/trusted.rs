//! The one room with `unsafe` in it: what wgpu cannot check and lets its caller vouch for.
#![expect(unsafe_code, reason = "shader modules without run-time checks, and a pipeline cache from disk")]

use wgpu::{Device, PipelineCache, PipelineCacheDescriptor, ShaderModule, ShaderModuleDescriptor, ShaderRuntimeChecks};

/// A module of one of our own programs, without the checks of indexes, loops and divisors that wgpu would add.
pub(super) fn module(device: &Device, descriptor: ShaderModuleDescriptor<'_>) -> ShaderModule {
    // SAFETY:
    // - bounds of tensors: matrices and vectors are accessed at `at_TENSOR(row, col)`, statistics at `params.TENSOR + row`
    //   (`source/accessors.rs`), where the program has tested `row < rows`, and `col < cols` or, where `IS_WHOLE`, its threads
    //   own just the columns that there are (`plan.rs`, `key`); a binding covers the first to the
    //   last element of the rows of its dispatch (`launch/bindings.rs`), which lie in the buffer (`launch/tensors.rs`). The
    //   place fits u32 (`plan/ranges.rs`), so that a sum which wraps on its way, as those of groups may, ends there all the
    //   same; a row and those of its group before it fit u32, or the call is refused (`launch.rs`);
    // - bounds of the workspace: the plan's length, which `launch/workspace.rs` holds it to;
    // - bounds of workgroup arrays: indexes are lanes of the workgroup, below its size whatever the subgroups, or
    //   quotients of them; `folded`, which has one element otherwise, is indexed only where `IS_FOLDED`;
    // - loops: bounded by numbers of Params; the one loop without such a bound, compare-exchange, fails spuriously, or
    //   when another invocation has succeeded;
    // - divisors: constants of the program and numbers of Params that the host sets to at least 1; `rows_per_group` is at
    //   least 2 where the program divides by it, since its key and the number come from one `Problem`.
    // Tests compare the bits with those of the checked form, which `WgpuBackend::checked` chooses.
    unsafe { device.create_shader_module_trusted(descriptor, ShaderRuntimeChecks::unchecked()) }
}

/// A pipeline cache that starts with what an earlier process kept.
pub(super) fn pipeline_cache(device: &Device, data: Option<&[u8]>) -> PipelineCache {
    let descriptor = PipelineCacheDescriptor { label: Some("rmsnorm"), data, fallback: true };
    // SAFETY:
    // - data: what `get_data` gave for an adapter of the same key and driver: the file is named by a hash of them and
    //   holds a hash of its contents (`cache.rs`), so one that is damaged is not used. Whoever can write to the user's
    //   cache folder is trusted, as for every compiled program in it.
    unsafe { device.create_pipeline_cache(&descriptor) }
}
