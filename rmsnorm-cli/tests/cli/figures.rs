//! Saved measurements: the files of `bench`, and the tables and pictures of `compare`.

use serde_json::{Value, json};

use crate::support::Folder;

/// A report of three shapes, measured as briefly as possible.
fn measured(folder: &Folder, json: &str) -> Value {
    let shapes = ["--shapes", "1x64,2x64,4x64", "--dtype", "f32", "--seconds", "0"];
    let args = [&["bench", "--backend", "cpu", "--threads", "1", "--json", json][..], &shapes].concat();
    let outcome = folder.rmsnorm(&args);
    assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""), "{outcome:?}");
    serde_json::from_slice(&std::fs::read(folder.path(json)).unwrap()).unwrap()
}

#[test]
fn every_row_tells_what_it_ran() {
    let document = measured(&Folder::new(), "report.json");
    let machine = &document["machine"];
    assert!(machine["devices"][0].as_str().unwrap().contains("1 thread"), "{machine}");
    assert!(machine["threads"].as_u64().unwrap() > 0);
    let rows = document["reports"][0]["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 3 * 2 * 3);
    assert_eq!(rows[0]["id"], "forward/rms_norm/f32/1x64/cpu");
    for row in rows {
        assert!(!row["revision"].as_str().unwrap().is_empty());
        assert!(row["plan"].as_str().unwrap().contains("tasks "), "{row}");
        assert!(row["samples_us"].as_array().unwrap().len() >= 7);
    }
}

/// Groups of threads on the cpu have a row for each shape and norm, on stdout and as JSON.
#[test]
fn groups_are_measured() {
    let folder = Folder::new();
    let group = [
        "bench",
        "--op",
        "forward_reduced,forward_reduced_rows,forward_columns",
        "--ranks",
        "3,2",
        "--backend",
        "cpu",
        "--norm",
        "rms_norm,layer_norm",
    ];
    let outcome = folder.rmsnorm(&[&group[..], &["--shapes", "3x64,1x100", "--json", "ranks.json"]].concat());
    assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""), "{outcome:?}");
    let document: Value = serde_json::from_slice(&std::fs::read(folder.path("ranks.json")).unwrap()).unwrap();
    let rows = document["rows"].as_array().unwrap();
    let ranks: Vec<_> = rows.iter().map(|row| row["ranks"].as_u64().unwrap()).collect();
    assert_eq!(ranks, [[3; 12], [2; 12]].concat());
    let shapes: Vec<_> =
        rows.iter().map(|row| (row["norm"].as_str().unwrap(), row["rows"].as_u64().unwrap())).collect();
    assert_eq!(shapes, [("rms_norm", 3), ("layer_norm", 3), ("rms_norm", 1), ("layer_norm", 1)].repeat(6));
    let ops = [0, 4, 8].map(|row: usize| rows[row]["op"].as_str().unwrap());
    assert_eq!(ops, ["forward_reduced", "forward_reduced_rows", "forward_columns"]);
    let is_head = |line: &&str| line.contains("ranks on") || line.starts_with("operation");
    let (heads, lines): (Vec<_>, Vec<_>) = outcome.stdout.lines().partition(is_head);
    assert_eq!([heads[0], heads[2]].map(|head| &head[..10]), ["3 ranks on", "2 ranks on"]);
    assert_eq!(lines.len(), rows.len());
    for (row, line) in rows.iter().zip(lines) {
        assert!(row["us"].as_f64().unwrap() > 0.0 && row["dtype"] == "bf16" && row["way"] == "threads", "{row}");
        assert!(line.starts_with(row["norm"].as_str().unwrap()) && line.ends_with("threads"), "{line}");
    }
    for (args, message) in [
        (&["bench", "--op", "forward_reduced"][..], "forward_reduced needs a group: pass --ranks N"),
        (
            &["bench", "--op", "forward", "--ranks", "2"],
            "--op: expected one of forward_reduced, forward_reduced_rows, forward_columns, got \"forward\"",
        ),
        (&["bench", "--ranks", "2", "--backend", "cpu,wgpu"], "expected one backend, got cpu,wgpu"),
        (
            &["bench", "--ranks", "2", "--backend", "cpu", "--shapes", "1000000x1000"],
            "--shapes: expected 1 to 268435456",
        ),
    ] {
        let outcome = folder.rmsnorm(args);
        assert_eq!(outcome.code, Some(2), "{outcome:?}");
        assert!(outcome.stderr.contains(message), "{message:?} is not in {:?}", outcome.stderr);
    }
}

#[test]
fn ours_and_peers_are_put_side_by_side() {
    let folder = Folder::new();
    let document = measured(&folder, "ours.json");
    let us = document["reports"][0]["rows"][0]["us"].as_f64().unwrap();
    let peers = json!([
        {"op": "rms_fwd", "dtype": "float32", "M": 1, "N": 64, "provider": "quack", "ms": us / 500.0, "gbps": 1.0,
         "mode": "graph"},
        {"op": "rms_fwd", "dtype": "float32", "M": 1, "N": 64, "provider": "liger", "error": "no"},
    ]);
    folder.write("peers.json", peers.to_string().as_bytes());
    let outcome = folder.rmsnorm(&["compare", "ours.json", "peers.json", "--plot", "figure.svg"]);
    assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""), "{outcome:?}");
    let lines: Vec<&str> = outcome.stdout.lines().collect();
    assert_eq!(lines.len(), 3, "{outcome:?}");
    assert!(lines[2].starts_with("| rms_norm forward | f32 | 1x64 |") && lines[2].ends_with("| 2.00x |"), "{lines:?}");
    let svg = String::from_utf8(std::fs::read(folder.path("figure.svg")).unwrap()).unwrap();
    assert!(svg.contains("rms_norm backward f32, ") || svg.contains("64 columns"), "no panel of rows");

    // A note lists unknown operations. A row needs a time or an error.
    let row =
        |op: &str, dtype: &str| json!({"op": op, "dtype": dtype, "M": 1, "N": 64, "provider": "a", "ms": 1, "gbps": 1});
    let peers =
        json!([row("rms_fwd", "float32"), row("rms_fwdd", "float32"), row("rms_fwd", "f32"), row("copy", "float32")]);
    folder.write("peers.json", peers.to_string().as_bytes());
    let outcome = folder.rmsnorm(&["compare", "ours.json", "peers.json"]);
    assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""), "{outcome:?}");
    assert!(!outcome.stdout.contains("rms_fwdd"), "only one source has it: {outcome:?}");

    // A table for a page has every source, also of operations that are not ours, and the commit of the run.
    let page = |args: &[&str]| folder.rmsnorm(&[&["compare", "ours.json", "peers.json", "--markdown"], args].concat());
    let outcome = page(&["--op", "rms_fwdd,forward/rms_norm", "--shapes", "1x64"]);
    let lines: Vec<&str> = outcome.stdout.lines().collect();
    assert_eq!(lines[0], "| time in us | shape | rmsnorm | a |", "{outcome:?}");
    assert_eq!(lines[2], "| rms fwdd | 1x64 |  | 1000+ |");
    assert!(lines[3].starts_with("| RMS forward | 1x64 | **"), "{outcome:?}");
    assert!(lines.last().unwrap().starts_with("measured on 20"), "{outcome:?}");
    let outcome = page(&["--shapes", "9x9"]);
    assert_eq!((outcome.code, outcome.stdout.as_str()), (Some(2), ""), "{outcome:?}");
    folder
        .write("peers.json", br#"[{"op":"rms_fwd","dtype":"float32","M":1,"N":64,"provider":"a","msec":1,"gbps":1}]"#);
    let outcome = folder.rmsnorm(&["compare", "ours.json", "peers.json"]);
    assert_eq!(outcome.code, Some(2), "{outcome:?}");
    assert!(outcome.stderr.contains("rms_fwd by a has neither ms and gbps nor an error"), "{outcome:?}");

    // Two runs of one backend are named after their files.
    measured(&folder, "again.json");
    let outcome = folder.rmsnorm(&["compare", "ours.json", "again.json"]);
    assert!(outcome.stdout.lines().next().unwrap().contains("cpu (again), us"), "{outcome:?}");
}

#[test]
fn times_at_one_shape_are_drawn_as_bars() {
    let folder = Folder::new();
    measured(&folder, "ours.json");
    let draw = |args: &[&str]| {
        let outcome = folder.rmsnorm(&[&["compare", "ours.json", "--bars", "bars.svg"], args].concat());
        assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""), "{outcome:?}");
        String::from_utf8(std::fs::read(folder.path("bars.svg")).unwrap()).unwrap()
    };
    // Two norms, forward, add_forward and backward; all shapes have as many measurements, so the largest is drawn.
    let svg = draw(&[]);
    assert!(svg.starts_with("<svg ") && svg.contains(">4x64: time of one call in us, shorter is faster<"), "{svg}");
    assert_eq!(svg.matches(">cpu<").count(), 2 * 3, "{svg}");
    assert!(svg.contains("prefers-color-scheme:dark"), "{svg}");
    assert!(draw(&["--shapes", "1x64"]).contains(">1x64: time of one call"));
    for (args, message) in [
        (&["--bars", "bars.svg", "--shapes", "8x64"][..], "no measurement in the files has the given"),
        (&["--bars", "absent/bars.svg"], "cannot write absent/bars.svg"),
    ] {
        let outcome = folder.rmsnorm(&[&["compare", "ours.json"], args].concat());
        assert_eq!((outcome.code, outcome.stdout.as_str()), (Some(2), ""), "{outcome:?}");
        assert!(outcome.stderr.contains(message) && outcome.stderr.lines().count() == 1, "{outcome:?}");
    }
}

#[test]
fn bench_compares_with_earlier_files_and_draws() {
    let folder = Folder::new();
    measured(&folder, "before.json");
    let args = ["bench", "--backend", "cpu", "--threads", "1", "--seconds", "0", "--dtype", "f32", "--op", "forward"];
    let more = ["--shapes", "1x64,2x64,4x64", "--compare", "before.json", "--plot", "figure.svg"];
    let outcome = folder.rmsnorm(&[&args[..], &more].concat());
    assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""), "{outcome:?}");
    assert!(outcome.stdout.contains("| cpu (before), us |"), "{outcome:?}");
    let svg = std::fs::read(folder.path("figure.svg")).unwrap();
    assert!(svg.starts_with(b"<svg"));
}

#[test]
fn runs_without_common_shapes_are_told_apart() {
    let folder = Folder::new();
    measured(&folder, "before.json");
    let bench = ["bench", "--backend", "cpu", "--threads", "1", "--seconds", "0", "--dtype", "f32", "--op", "forward"];
    let outcome =
        folder.rmsnorm(&[&bench[..], &["--norm", "rms_norm", "--shapes", "1x32", "--compare", "before.json"]].concat());
    assert!(outcome.stdout.ends_with("no two sources have a shape in common\n"), "{outcome:?}");
    folder.write("other.json", br#"[{"op":"rms_fwd","dtype":"float32","M":1,"N":8,"provider":"a","ms":1,"gbps":1}]"#);
    let outcome = folder.rmsnorm(&["compare", "before.json", "other.json"]);
    assert_eq!(outcome.stdout, "no two sources have a shape in common\n");
}

/// Each kind of scales is checked, measured and named, and compared with another project's kernel
/// of the same kind.
#[test]
fn codes_are_measured_in_every_way() {
    let folder = Folder::new();
    let bench =
        ["bench", "--backend", "cpu", "--threads", "1", "--seconds", "0", "--dtype", "bf16", "--shapes", "3x160"];
    let ops = ["--op", "quantized_forward,add_quantized_forward", "--json", "codes.json"];
    let outcome = folder.rmsnorm(&[&bench[..], &ops].concat());
    assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""), "{outcome:?}");
    let document: Value = serde_json::from_slice(&std::fs::read(folder.path("codes.json")).unwrap()).unwrap();
    let rows = document["reports"][0]["rows"].as_array().unwrap();
    // Two norms, two operations, nine kinds of scales.
    assert_eq!(rows.len(), 36);
    let bytes_of = |op: &str| {
        let row = rows.iter().find(|row| row["norm"] == "rms_norm" && row["op"] == op).unwrap();
        row["bytes"].as_u64().unwrap()
    };
    // The bytes of x, weight, rstd and codes; each kind adds its own.
    let least = 2 * (480 + 160) + 12 + 480;
    for (name, more) in [
        ("tensor", 4),
        ("current", 4),
        ("row", 12),
        ("block128", 24),
        ("mx", 15),
        ("transposed", 484),
        ("mx_columnwise", 15 + 480 + 160),
    ] {
        assert_eq!(bytes_of(&format!("quantized_forward.{name}")), least + more, "{name}");
    }
    assert_eq!(bytes_of("add_quantized_forward.row"), least + 12 + 2 * 960);

    let peer = r#"[{"op":"rms_row","dtype":"bfloat16","M":3,"N":160,"provider":"peer","ms":1,"gbps":1}]"#;
    folder.write("peers.json", peer.as_bytes());
    let outcome = folder.rmsnorm(&["compare", "codes.json", "peers.json"]);
    assert!(outcome.stdout.contains("rms_norm quantized_forward.row"), "{outcome:?}");
    let only = ["--op", "quantized_forward", "--quant", "mx,row", "--norm", "layer_norm"];
    let outcome = folder.rmsnorm(&[&bench[..], &only].concat());
    let names = outcome.stdout.lines().filter_map(|line| line.strip_prefix("layer_norm ")?.split(' ').next());
    assert_eq!(names.collect::<Vec<_>>(), ["quantized_forward.row", "quantized_forward.mx"], "{outcome:?}");
}

#[test]
fn measurements_are_added_to_a_file() {
    let folder = Folder::new();
    let add = |shapes: &str, op: &str| {
        let args =
            ["bench", "--backend", "cpu", "--threads", "1", "--seconds", "0", "--dtype", "f32", "--norm", "rms_norm"];
        let outcome = folder.rmsnorm(&[&args[..], &["--op", op, "--shapes", shapes, "--append", "all.json"]].concat());
        assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""), "{outcome:?}");
        let document: Value = serde_json::from_slice(&std::fs::read(folder.path("all.json")).unwrap()).unwrap();
        let reports = document["reports"].as_array().unwrap();
        assert_eq!(reports.len(), 1);
        let ids = reports[0]["rows"].as_array().unwrap().iter().map(|row| row["id"].as_str().unwrap().to_owned());
        ids.collect::<Vec<_>>()
    };
    assert_eq!(add("2x64", "backward"), ["backward/rms_norm/f32/2x64/cpu"]);
    // Rows are sorted, and a row that is measured again replaces the first.
    let both = ["forward/rms_norm/f32/1x64/cpu", "backward/rms_norm/f32/2x64/cpu"];
    assert_eq!(add("1x64", "forward"), both);
    assert_eq!(add("1x64", "forward"), both);

    let mut other: Value = serde_json::from_slice(&std::fs::read(folder.path("all.json")).unwrap()).unwrap();
    other["machine"]["threads"] = 4096.into();
    folder.write("other.json", other.to_string().as_bytes());
    let outcome = folder.rmsnorm(&["bench", "--append", "other.json"]);
    assert_eq!((outcome.code, outcome.stdout.as_str()), (Some(2), ""), "{outcome:?}");
    assert!(outcome.stderr.contains("other.json is of another machine: ") && outcome.stderr.lines().count() == 1);
}

#[test]
fn lists_of_shapes_have_names() {
    let outcome = Folder::new().rmsnorm(&["bench", "--shapes", "1x64,@h200-f32", "--list"]);
    assert_eq!((outcome.code, outcome.stdout.as_str()), (Some(0), "1x64\n32768x1024\n16384x4096\n"), "{outcome:?}");
}

#[test]
fn figures_are_held_to_targets() {
    let folder = Folder::new();
    let document = measured(&folder, "ours.json");
    let us = document["reports"][0]["rows"][0]["us"].as_f64().unwrap();
    let entry = "[[target]]\nbackend = \"cpu\"\noperations = [\"rms_norm forward\"]\ndtype = \"f32\"\n";
    let limits = format!("us = {{ 1x64 = {}, 2x64 = 1e-6, 3x64 = 1 }}", us + 1.0);
    folder.write("targets.toml", format!("{entry}{limits}").as_bytes());
    let outcome = folder.rmsnorm(&["compare", "ours.json", "--targets", "targets.toml"]);
    assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""), "{outcome:?}");
    let lines: Vec<&str> = outcome.stdout.lines().rev().take(3).collect();
    assert_eq!(lines[0], "1 of 2 figures meet their targets; targets without a figure: 1");
    assert!(lines[1].starts_with("| rms_norm forward | f32 | 2x64 | cpu | ") && lines[1].contains(" | missed by "));
    assert!(lines[2].starts_with("| rms_norm forward | f32 | 1x64 | cpu | ") && lines[2].ends_with(" | met |"));
}

#[test]
fn what_cannot_be_read_or_drawn_is_one_line_before_any_work() {
    let folder = Folder::new();
    folder.write("text", b"hello");
    folder.write("broken.json", b"{\"machine\": ");
    folder.write("list.json", b"[{\"op\": 1}]");
    folder.write("empty.json", b"[]");
    folder.write("targets.toml", b"goal = 1");
    folder.write("binary", &[0xff, 0xfe, 0]);
    let row = |m: f64, ms: f64| {
        json!([{"op": "rms_fwd", "dtype": "float32", "M": m as usize, "N": 64, "provider": "quack",
        "ms": ms, "gbps": 1.0, "mode": "graph"}])
    };
    folder.write("rows.json", row(0.0, 1.0).to_string().as_bytes());
    folder.write("time.json", row(1.0, 0.0).to_string().as_bytes());
    folder.write("huge.json", row(1e18, 1.0).to_string().as_bytes());
    let cases: [(&[&str], &str); 21] = [
        (&["compare", "rows.json", "--plot", "figure.svg"], "a size or a time that is impossible"),
        (&["compare", "time.json", "--plot", "figure.svg"], "a size or a time that is impossible"),
        (&["compare", "huge.json", "--plot", "figure.svg"], "a size or a time that is impossible"),
        (&["bench", "--backend", "cpu", "--shapes", "1x64,2x64", "--plot", "figure.svg"], "--plot: a plot needs 3"),
        (&["compare", "absent.json"], "cannot read absent.json"),
        (&["compare", "text"], "neither a report of `rmsnorm bench --json` nor peers' results"),
        (&["compare", "broken.json"], "it starts as a report of `rmsnorm bench --json`, but "),
        (&["compare", "list.json"], "it starts as a list of peers' rows, but "),
        (&["compare", "binary"], "cannot read binary"),
        (&["compare", "empty.json"], "no measurements to compare"),
        (&["compare", "empty.json", "--plot", "absent/figure.svg"], "cannot write absent/figure.svg"),
        (&["bench", "--compare", "broken.json"], "it starts as a report"),
        (&["bench", "--plot", "absent/figure.svg"], "cannot write absent/figure.svg"),
        (&["bench", "--append", "broken.json"], "cannot read broken.json: it is no report of `rmsnorm bench --json`"),
        (&["bench", "--append", "list.json"], "cannot read list.json: it is no report of `rmsnorm bench --json`"),
        (&["bench", "--append", "absent/all.json"], "cannot write absent/all.json"),
        (&["bench", "--shapes", "@h200"], "--shapes: expected one of @h200-backward, "),
        (&["compare", "empty.json", "--targets", "absent.toml"], "cannot read absent.toml"),
        (&["compare", "empty.json", "--targets", "text"], "cannot read text: line 1: "),
        (&["compare", "empty.json", "--targets", "targets.toml"], "targets.toml: line 1: unknown field `goal`"),
        (&["bench", "--sweep", "diagonal"], "--sweep: expected one of cols, rows, between, got \"diagonal\""),
    ];
    let before = folder.names();
    for (args, words) in cases {
        let outcome = folder.rmsnorm(args);
        assert_eq!((outcome.code, outcome.stdout.as_str()), (Some(2), ""), "{args:?}: {outcome:?}");
        assert_eq!(outcome.stderr.lines().count(), 1, "{args:?}: {outcome:?}");
        assert!(outcome.stderr.contains(words), "{words:?} is not in {:?}", outcome.stderr);
    }
    assert_eq!(folder.names(), before);
}
