//! Buffers read by the host.

use futures_channel::oneshot;
use rmsnorm_spec::Error;
use wgpu::{Buffer, BufferView, Device, MapMode, PollType};

use crate::error::{WgpuFailure, device_error, scoped};

/// The bytes of a buffer with `BufferUsages::MAP_READ`, after all work submitted so far.
///
/// # Errors
/// `Device` if the device fails, or the buffer is not valid.
pub(crate) async fn read(device: &Device, buffer: &Buffer, operation: &'static str) -> Result<BufferView, Error> {
    let failure = |error: &dyn std::error::Error| device_error(WgpuFailure::internal(operation, error));
    let (sender, mapped) = oneshot::channel();
    scoped(device, operation, || {
        buffer.map_async(MapMode::Read, .., move |outcome| {
            // The receiver is gone if the caller does not await this function to its end.
            let _ = sender.send(outcome);
        });
        Ok(())
    })?;
    // Waits on native devices, and does nothing in a browser, which maps by itself.
    device.poll(PollType::wait_indefinitely()).map_err(|error| failure(&error))?;
    mapped.await.map_err(|error| failure(&error))?.map_err(|error| failure(&error))?;
    buffer.get_mapped_range(..).map_err(|error| failure(&error))
}
