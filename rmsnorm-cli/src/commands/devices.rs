//! `rmsnorm devices`: every device with its tuning table, or why a backend is missing and how to
//! fix that.

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

/// Two lines for each device: its description and its tuning table, or the reason why it is missing
/// and the fix.
pub fn table(devices: &[Availability]) -> String {
    devices.iter().map(entry).collect()
}

fn entry(Availability { device, status, tuning }: &Availability) -> String {
    match status {
        Ok(description) => {
            let tuning = tuning.as_deref().unwrap_or_default();
            format!("{device:<6} ready    {description}\n{:<6} tuning   {tuning}\n", "")
        }
        Err(reason) => {
            // The backends' errors end with the fix where they know one.
            let (reason, fix) = reason.split_once("; fix: ").unwrap_or((reason, ""));
            let fix = if fix.is_empty() { String::new() } else { format!("{:<6} fix      {fix}\n", "") };
            format!("{device:<6} missing  {reason}\n{fix}")
        }
    }
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
