//! `rmsnorm devices`: every backend, with what it runs on and by which table of tiles, or why it cannot.

use rmsnorm_core::{Availability, available};
use serde_json::{Value, json};

use crate::args::DevicesArgs;
use crate::failure::Failure;
use crate::output::print;

/// Prints the list.
pub fn run(args: &DevicesArgs) -> Result<(), Failure> {
    let devices = available();
    if args.json {
        let devices: Vec<Value> = devices.iter().map(as_json).collect();
        print(&format!("{:#}\n", json!({ "devices": devices })))
    } else {
        print(&table(&devices))
    }
}

/// One line per device, and one of its table.
pub fn table(devices: &[Availability]) -> String {
    let line = |entry: &Availability| match &entry.status {
        Ok(description) => {
            let tuning = entry.tuning.as_deref().unwrap_or_default();
            format!("{:<6} ready    {description}\n{:<6} tuning   {tuning}\n", entry.device, "")
        }
        Err(reason) => format!("{:<6} missing  {reason}\n", entry.device),
    };
    devices.iter().map(line).collect()
}

fn as_json(entry: &Availability) -> Value {
    match &entry.status {
        Ok(description) => json!({
            "name": entry.device.to_string(),
            "available": true,
            "description": description,
            "tuning": entry.tuning,
        }),
        Err(reason) => json!({ "name": entry.device.to_string(), "available": false, "reason": reason }),
    }
}
