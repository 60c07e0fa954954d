//! Checks the committed results: each can be read and names its machine, and its figures name the
//! plan that ran.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::path::{Path, PathBuf};

use serde_json::Value;

type Parsed = (PathBuf, Value);

fn files(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files(&path, extension));
        } else if path.extension().is_some_and(|known| known == extension) {
            found.push(path);
        }
    }
    found
}

fn results() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("results")
}

fn parse(path: &Path, text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Every JSON file, by kind.
struct Results {
    /// Documents of `rmsnorm bench --json`.
    reports: Vec<Parsed>,
    /// Documents of `rmsnorm bench --ranks N --json`.
    groups: Vec<Parsed>,
    /// Documents of the Python package's benchmarks.
    python: Vec<Parsed>,
    /// Lists of peers' rows.
    lists: Vec<Parsed>,
}

impl Results {
    fn read() -> Results {
        let read = |path: PathBuf| (path.clone(), parse(&path, &std::fs::read_to_string(&path).unwrap()));
        let (documents, lists): (Vec<_>, _) =
            files(&results(), "json").into_iter().map(read).partition(|(_, value)| value.is_object());
        let (reports, documents): (Vec<_>, Vec<_>) =
            documents.into_iter().partition(|(_, document)| document["reports"].is_array());
        let (groups, python) = documents.into_iter().partition(|(_, document)| document["rows"][0]["way"].is_string());
        Results { reports, groups, python, lists }
    }
}

/// All numbers named `us` within a value.
fn times(value: &Value) -> Vec<f64> {
    match value {
        Value::Object(fields) => {
            let of = |(name, field): (&String, &Value)| match field.as_f64() {
                Some(us) if name == "us" => vec![us],
                _ => times(field),
            };
            fields.iter().flat_map(of).collect()
        }
        Value::Array(values) => values.iter().flat_map(times).collect(),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => Vec::new(),
    }
}

#[test]
fn every_result_tells_its_machine() {
    let Results { reports, groups, python, lists } = Results::read();
    assert!(reports.len() >= 3, "{}", reports.len());
    for (path, document) in reports.iter().chain(&groups).chain(&python) {
        let (path, machine) = (path.display(), &document["machine"]);
        assert!(machine["os"].is_string() && machine["arch"].is_string(), "{path}: {machine}");
        assert!(machine["threads"].as_u64().is_some_and(|threads| threads > 0), "{path}: {machine}");
    }
    for (path, document) in &reports {
        let (path, reports) = (path.display(), document["reports"].as_array().unwrap());
        assert!(!reports.is_empty(), "{path}");
        for report in reports {
            assert!(report["device"].as_str().is_some_and(|device| !device.is_empty()), "{path}");
            for row in report["rows"].as_array().unwrap() {
                for number in ["rows", "cols", "us", "gbs", "copy_gbs", "bytes"] {
                    assert!(row[number].as_f64().is_some_and(|number| number > 0.0), "{path}: {number} of {row}");
                }
            }
        }
    }
    for (path, document) in &groups {
        let (path, devices) = (path.display(), document["machine"]["devices"].as_array());
        assert!(devices.is_some_and(|devices| !devices.is_empty()), "{path}");
        assert!(document["revision"].as_str().is_some_and(|commit| commit.len() >= 7), "{path}");
        let rows = document["rows"].as_array().unwrap();
        let is_row = |row: &Value| row["us"].as_f64().is_some_and(|us| us > 0.0) && row["way"].is_string();
        assert!(!rows.is_empty() && rows.iter().all(is_row), "{path}");
    }
    for (path, document) in &python {
        assert!(document["device"].as_str().is_some_and(|device| !device.is_empty()), "{}", path.display());
        let times = times(&document["rows"]);
        assert!(!times.is_empty() && times.iter().all(|us| *us > 0.0), "{}: {times:?}", path.display());
    }
    // Lists are peers' rows; their folder has a report of the same machine.
    for (path, list) in &lists {
        assert!(reports.iter().any(|(report, _)| report.parent() == path.parent()), "{}", path.display());
        for row in list.as_array().unwrap().iter().filter(|row| row["machine"].is_null()) {
            assert!(row["op"].is_string() && row["provider"].is_string(), "{}: {row}", path.display());
        }
    }
}

/// Every row names its commit and the plan that ran. Documents of the Python benchmarks name the
/// commit and the frameworks' versions.
#[test]
fn every_figure_tells_what_it_ran() {
    let mut recorded = 0;
    let Results { reports, python, .. } = Results::read();
    for (path, document) in &python {
        let versions = ["torch", "jax"].map(|name| document[name].as_str());
        assert!(versions.iter().any(Option::is_some), "{}: of which framework", path.display());
        assert!(document["python"].is_string(), "{}", path.display());
        assert!(document["revision"].as_str().is_some_and(|commit| commit.len() >= 7), "{}", path.display());
    }
    for (path, document) in reports {
        let name = path.strip_prefix(results()).unwrap().to_str().unwrap();
        for report in document["reports"].as_array().unwrap() {
            for row in report["rows"].as_array().unwrap() {
                let text = |name: &str| row[name].as_str().unwrap_or_else(|| panic!("{name}: {}", path.display()));
                assert!(!text("plan").is_empty() && !text("revision").is_empty(), "{name}: {row}");
                recorded += 1;
            }
        }
    }
    assert!(recorded > 0, "no result tells what it ran");
}
