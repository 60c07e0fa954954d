//! Capabilities of a device that plans and programs depend on, read once.

use wgpu::{Device, DeviceType, Features};

use crate::error::IS_BROWSER;
use crate::plan::tuning::Tuning;
use crate::unfit::PlanError;

/// How programs convert f16. All three give the same bits, except for NaN payloads. If a compiler
/// contracts a conversion with a multiplication and an addition (rounding once), results may differ
/// within the error bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum F16 {
    /// With integer arithmetic.
    Integers,
    /// `unpack2x16float` for values that are not subnormal, otherwise integer arithmetic. wgpu
    /// lacks the function on a few software devices.
    Unpacks,
    /// With `unpack2x16float` and `pack2x16float`.
    Converts,
}

impl F16 {
    /// The same without the device's conversions.
    pub(crate) const fn without_conversions(self) -> Self {
        match self {
            F16::Converts => F16::Unpacks,
            F16::Unpacks | F16::Integers => self,
        }
    }
}

/// The device properties that a plan depends on. They are the limits requested for the device,
/// which may be lower than the adapter's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Caps {
    /// Maximum threads per workgroup.
    pub(crate) max_threads: u32,
    /// Bytes of workgroup memory.
    pub(crate) workgroup_bytes: u32,
    /// Maximum bytes of a storage buffer binding.
    pub(crate) binding_bytes: u64,
    /// Maximum storage buffers of a program.
    pub(crate) storage_buffers: u32,
    /// Alignment of binding offsets; at least 16, so that packs stay aligned in a binding.
    pub(crate) offset_alignment: u32,
    /// Maximum workgroups in one dimension of a dispatch.
    pub(crate) groups_per_dimension: u32,
    /// Lanes per subgroup, if constant for all programs.
    pub(crate) subgroup: Option<u32>,
    /// Workgroups of 128 threads that fill the device. Estimated from the device type, since wgpu
    /// does not report the number of multiprocessors.
    pub(crate) workgroups: u32,
    /// How programs convert f16.
    pub(crate) f16: F16,
    /// Measured tile sizes: the built-in table, or one measured on this device.
    pub(crate) tuning: &'static Tuning,
}

impl Caps {
    /// The capabilities of a device that converts f16 in this way, from the features and limits that
    /// it was created with.
    pub(crate) fn read(device: &Device, f16: F16) -> Self {
        let (limits, info) = (device.limits(), device.adapter_info());
        let is_fixed = info.subgroup_min_size == info.subgroup_max_size
            && is_usable_subgroup(info.subgroup_min_size)
            && device.features().contains(Features::SUBGROUP);
        Caps {
            max_threads: limits.max_compute_invocations_per_workgroup.min(limits.max_compute_workgroup_size_x),
            workgroup_bytes: limits.max_compute_workgroup_storage_size,
            binding_bytes: limits.max_storage_buffer_binding_size,
            storage_buffers: limits.max_storage_buffers_per_shader_stage,
            offset_alignment: limits.min_storage_buffer_offset_alignment.max(16),
            groups_per_dimension: limits.max_compute_workgroups_per_dimension,
            subgroup: is_fixed.then_some(info.subgroup_min_size),
            workgroups: match info.device_type {
                // Four for each of an H200's 132 multiprocessors.
                DeviceType::DiscreteGpu => 528,
                // A browser does not tell the type of a GPU. This is the number of a large one
                // (docs/internals/tried.md).
                DeviceType::Other if IS_BROWSER => 528,
                DeviceType::IntegratedGpu | DeviceType::VirtualGpu | DeviceType::Other => 128,
                DeviceType::Cpu => 8,
            },
            f16,
            tuning: Tuning::H200,
        }
    }

    /// Checks that every program has a form that fits the device.
    ///
    /// # Errors
    /// [`PlanError::Device`]
    pub(crate) fn check(&self) -> Result<(), PlanError> {
        let Caps { max_threads, workgroup_bytes, .. } = *self;
        if max_threads < 64 || workgroup_bytes < 4096 {
            return Err(PlanError::Device { threads: max_threads, workgroup_bytes });
        }
        Ok(())
    }

    /// `wanted` threads, or the largest power of two that fits a workgroup.
    pub(crate) const fn threads(&self, wanted: u32) -> u32 {
        self.threads_with(wanted, 1)
    }

    /// As [`Caps::threads`], with `bytes` of workgroup memory per thread.
    pub(crate) const fn threads_with(&self, wanted: u32, bytes: u32) -> u32 {
        let by_memory = self.workgroup_bytes / bytes;
        let most = if self.max_threads < by_memory { self.max_threads } else { by_memory };
        match (wanted <= most, most) {
            (true, _) => wanted,
            (false, 0) => 1,
            (false, _) => 1 << most.ilog2(),
        }
    }

    /// Maximum bytes of a tensor that fits one binding at any offset. The binding starts less than
    /// one alignment before the tensor. Element indices must fit 31 bits.
    pub(crate) const fn available_bytes(&self) -> u64 {
        let most = i32::MAX as u64;
        let bytes = if self.binding_bytes < most { self.binding_bytes } else { most };
        // A binding has a multiple of 4 bytes.
        (bytes / 4 * 4).saturating_sub(self.offset_alignment as u64)
    }

    /// Maximum workgroups of a dispatch, over two dimensions.
    pub(crate) const fn most_groups(&self) -> u64 {
        // The product must fit 32 bits.
        let side = if self.groups_per_dimension < 65535 { self.groups_per_dimension } else { 65535 };
        side as u64 * side as u64
    }
}

/// Whether sums of a row may use subgroups of `lanes` lanes. Smaller subgroups would need longer
/// addition chains over a row than math.md section 4 allows.
const fn is_usable_subgroup(lanes: u32) -> bool {
    lanes.is_power_of_two() && 8 <= lanes && lanes <= 128
}

/// Devices for tests of plans, which need no GPU.
#[cfg(test)]
impl Caps {
    /// An H200 through Vulkan, with all limits of the adapter.
    pub(crate) const fn h200() -> Self {
        Caps {
            max_threads: 1024,
            workgroup_bytes: 48 << 10,
            binding_bytes: i32::MAX as u64,
            storage_buffers: 1 << 20,
            offset_alignment: 16,
            groups_per_dimension: 65535,
            subgroup: Some(32),
            workgroups: 528,
            f16: F16::Converts,
            tuning: Tuning::H200,
        }
    }

    /// An integrated GPU with wgpu's default limits and subgroups.
    pub(crate) const fn laptop() -> Self {
        Caps {
            max_threads: 256,
            workgroup_bytes: 16 << 10,
            binding_bytes: 128 << 20,
            storage_buffers: 8,
            offset_alignment: 256,
            workgroups: 128,
            f16: F16::Unpacks,
            ..Caps::h200()
        }
    }

    /// Limits of Chromium on a desktop. wgpu offers no subgroups there.
    pub(crate) const fn browser() -> Self {
        let f16 = F16::Converts;
        Caps { workgroup_bytes: 32 << 10, storage_buffers: 10, subgroup: None, workgroups: 528, f16, ..Caps::laptop() }
    }

    /// wgpu's downlevel limits, without subgroups.
    pub(crate) const fn phone() -> Self {
        Caps { workgroup_bytes: 16352, subgroup: None, ..Caps::laptop() }
    }

    /// Mesa's software device, with all limits of the adapter.
    pub(crate) const fn lavapipe() -> Self {
        Caps {
            workgroup_bytes: 32 << 10,
            binding_bytes: 128 << 20,
            subgroup: Some(8),
            workgroups: 8,
            f16: F16::Unpacks,
            ..Caps::h200()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_device_has_64_threads_and_4096_bytes() {
        let check = |max_threads, workgroup_bytes| Caps { max_threads, workgroup_bytes, ..Caps::phone() }.check();
        assert_eq!([check(64, 4096), check(65, 4097)], [Ok(()); 2]);
        for (threads, workgroup_bytes) in [(63, 4096), (64, 4095), (0, 0)] {
            assert_eq!(check(threads, workgroup_bytes), Err(PlanError::Device { threads, workgroup_bytes }));
        }
    }

    /// The wanted number, or the largest power of two that fits the limits of threads and memory.
    #[test]
    fn threads_are_as_many_as_a_workgroup_has_and_its_memory_holds() {
        let caps = |max_threads, workgroup_bytes| Caps { max_threads, workgroup_bytes, ..Caps::phone() };
        assert_eq!([96, 256, 257, 1024].map(|wanted| caps(256, 16 << 10).threads(wanted)), [96, 256, 256, 256]);
        assert_eq!([300, 301].map(|wanted| caps(300, 16 << 10).threads(wanted)), [300, 256]);
        assert_eq!([1, 32, 64].map(|bytes| caps(256, 4096).threads_with(256, bytes)), [256, 128, 64]);
        assert_eq!([128, 129].map(|wanted| caps(256, 4100).threads_with(wanted, 32)), [128, 128]);
        assert_eq!(caps(256, 16).threads_with(256, 32), 1);
    }

    #[test]
    fn what_is_bound_is_in_words_less_an_alignment_and_indexed_in_31_bits() {
        let available =
            |binding_bytes| Caps { binding_bytes, offset_alignment: 256, ..Caps::phone() }.available_bytes();
        assert_eq!([0, 256, 260, 1027].map(available), [0, 0, 4, 768]);
        let most = i32::MAX as u64 / 4 * 4 - 256;
        assert_eq!([i32::MAX as u64, 1 << 31, u64::MAX].map(available), [most; 3]);
    }

    #[test]
    fn a_grid_is_counted_in_32_bits() {
        let most_groups = |groups_per_dimension| Caps { groups_per_dimension, ..Caps::phone() }.most_groups();
        let most = u64::from(u16::MAX).pow(2);
        assert_eq!([4, 65_534, 65_535, 65_536, u32::MAX].map(most_groups), [16, 65_534 * 65_534, most, most, most]);
    }

    #[test]
    fn subgroups_of_8_to_128_lanes_are_used() {
        let usable: Vec<u32> = (0..300).filter(|lanes| is_usable_subgroup(*lanes)).collect();
        assert_eq!(usable, [8, 16, 32, 64, 128]);
    }
}
