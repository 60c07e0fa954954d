//! `rmsnorm run` with quantized results: names, types and shapes of the outputs, each code and
//! scale by the definition, and the settings that are refused.

use rmsnorm_core::quant::{CodeType, QuantSpec, ScaleKind, ScaleLayout, ScaleRounding};
use rmsnorm_core::{DType, Norm};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};

use crate::run::{inputs, metadata};
use crate::support::{Folder, Tensor, file};

const ROWS: usize = 6;
const COLS: usize = 150;

/// A folder with a file of x, weight and perhaps a scale, and the norm of x in f32.
fn folder(norm: Norm, has_scale: bool) -> (Folder, Vec<f32>) {
    folder_of(norm, &[2, 3, COLS], has_scale)
}

fn folder_of(norm: Norm, shape: &[usize], has_scale: bool) -> (Folder, Vec<f32>) {
    let folder = Folder::new();
    let mut inputs = inputs(norm, &[("x", DType::F32, shape), ("weight", DType::F32, &[COLS])]);
    if has_scale {
        inputs.tensors.insert("scale", Tensor { dtype: DType::F32, shape: vec![1], values: vec![0.03125] });
    }
    folder.write("in", &file(&inputs.tensors, &metadata(norm)));
    assert_eq!(folder.rmsnorm(&["run", "in", "-o", "y", "--allow-unknown"]).code, Some(0));
    let bytes = std::fs::read(folder.path("y")).unwrap();
    let y = floats(&SafeTensors::deserialize(&bytes).unwrap().tensor("y").unwrap());
    (folder, y)
}

fn floats(tensor: &TensorView<'_>) -> Vec<f32> {
    tensor.data().as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

/// The names, types and shapes in a file, in alphabetical order.
fn described(file: &SafeTensors<'_>) -> String {
    let mut names: Vec<&str> = file.names();
    names.sort_unstable();
    let one = |name: &&str| {
        let tensor = file.tensor(name).unwrap();
        format!("{name} {} {:?}", tensor.dtype(), tensor.shape())
    };
    names.iter().map(one).collect::<Vec<_>>().join(", ")
}

fn run(folder: &Folder, args: &[&str]) -> Vec<u8> {
    let outcome = folder.rmsnorm(&[&["run", "in", "-o", "out"], args].concat());
    assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""), "{args:?}");
    std::fs::read(folder.path("out")).unwrap()
}

#[test]
fn quantized_codes_and_scales_are_those_of_the_definition() {
    let row = QuantSpec::new(CodeType::E4m3, ScaleKind::Row);
    let block = QuantSpec::new(CodeType::E5m2, ScaleKind::Block { cols: 64, is_power_of_two: true });
    let mx = QuantSpec::new(CodeType::E4m3, ScaleKind::Mx { rounding: ScaleRounding::Floor });
    let swizzled = mx.layout(ScaleLayout::Swizzled128x4);
    let int8 = QuantSpec::new(CodeType::Int8, ScaleKind::Row).amax_floor(2.0).amax_ceiling(2.5);
    let (block_args, mx_args) = (["--scale", "block64", "--pow2", "1"], ["--scale", "mx", "--mx-rounding", "floor"]);
    for norm in Norm::ALL {
        let (folder, y) = folder(norm, false);
        let mean = if norm == Norm::Layer { "mean F32 [2, 3], " } else { "" };
        for (quant, args, scales_are) in [
            (row, &[][..], "F32 [2, 3]"),
            (block, &block_args[..], "F32 [2, 3, 3]"),
            (mx, &mx_args[..], "U8 [2, 3, 5]"),
            (swizzled, &[&mx_args[..], &["--layout", "swizzled128x4"]].concat()[..], "U8 [1, 2, 32, 4, 4]"),
            (int8, &["--amax-floor", "2", "--amax-ceiling", "2.5"], "F32 [2, 3]"),
        ] {
            let bytes = run(&folder, &[&["--codes", quant.codes.name()], args].concat());
            let out = SafeTensors::deserialize(&bytes).unwrap();
            let format = match quant.codes {
                CodeType::E4m3 => Dtype::F8_E4M3,
                CodeType::E5m2 => Dtype::F8_E5M2,
                CodeType::Int8 => Dtype::I8,
            };
            let expected = format!("codes {format} [2, 3, 150], {mean}rstd F32 [2, 3], scales {scales_are}");
            assert_eq!(described(&out), expected, "{quant:?}");
            let (codes, scales) = (out.tensor("codes").unwrap(), out.tensor("scales").unwrap());
            let groups = quant.scale.groups(COLS).unwrap();
            let width = quant.scale.set_cols(COLS).unwrap();
            for (r, y) in y.chunks(COLS).enumerate() {
                for (group, set) in y.chunks(width).enumerate() {
                    let amax = set.iter().fold(0.0, |amax: f32, y| amax.max(y.abs()));
                    let (scale, place) = (quant.scale(amax), quant.layout.index(groups, r, group));
                    match quant.scale_byte(amax) {
                        Some(byte) => assert_eq!(scales.data()[place], byte, "{quant:?}"),
                        None => assert_eq!(floats(&scales)[place], scale, "{quant:?}"),
                    }
                    let start = r * COLS + group * width;
                    let expected: Vec<u8> = set.iter().map(|y| quant.codes.encode(y / scale)).collect();
                    assert_eq!(codes.data()[start..start + set.len()], expected, "{quant:?}");
                }
            }
        }
    }
}

/// The columnwise copy equals the quantized transpose, of 150 rows and 132 columns.
#[test]
fn quantized_along_columns_is_the_transposed_matrix() {
    const ROWS: usize = 132;
    for norm in Norm::ALL {
        let (folder, y) = folder_of(norm, &[11, 12, COLS], false);
        for (scale, layout, scales_are) in [
            ("block128", "row_major", "F32 [150, 2]"),
            ("block64", "column_major", "F32 [3, 152]"),
            ("mx", "row_major", "U8 [150, 5]"),
            ("mx", "swizzled128x4", "U8 [2, 2, 32, 4, 4]"),
        ] {
            let args = ["--codes", "e4m3", "--scale", scale, "--layout", layout, "--columnwise", "1"];
            let bytes = run(&folder, &args);
            let out = SafeTensors::deserialize(&bytes).unwrap();
            let (codes, scales) = (out.tensor("codes_columnwise").unwrap(), out.tensor("scales_columnwise").unwrap());
            assert_eq!(format!("{} {:?}", codes.dtype(), codes.shape()), "F8_E4M3 [150, 132]");
            assert_eq!(format!("{} {:?}", scales.dtype(), scales.shape()), scales_are);
            let kind = match scale {
                "mx" => ScaleKind::Mx { rounding: ScaleRounding::Up },
                "block64" => ScaleKind::Block { cols: 64, is_power_of_two: false },
                _ => ScaleKind::Block { cols: 128, is_power_of_two: false },
            };
            let quant = QuantSpec::new(CodeType::E4m3, kind);
            let (height, groups) = (kind.set_cols(ROWS).unwrap(), kind.groups(ROWS).unwrap());
            let lies = match layout {
                "swizzled128x4" => ScaleLayout::Swizzled128x4,
                "column_major" => ScaleLayout::ColumnMajor { ld: 152 },
                _ => ScaleLayout::RowMajor,
            };
            for col in 0..COLS {
                let column: Vec<f32> = (0..ROWS).map(|row| y[row * COLS + col]).collect();
                for (group, set) in column.chunks(height).enumerate() {
                    let amax = set.iter().fold(0.0, |amax: f32, y| amax.max(y.abs()));
                    let (value, place) = (quant.scale(amax), lies.index(groups, col, group));
                    match quant.scale_byte(amax) {
                        Some(byte) => assert_eq!(scales.data()[place], byte, "{scale} {layout} {col}"),
                        None => assert_eq!(floats(&scales)[place], value, "{scale} {layout} {col}"),
                    }
                    let expected: Vec<u8> = set.iter().map(|y| quant.codes.encode(y / value)).collect();
                    let start = col * ROWS + group * height;
                    assert_eq!(codes.data()[start..start + set.len()], expected, "{scale} {layout} {col}");
                }
            }
        }
    }
}

/// With a given scale: amax, transposed codes and y are written too, and gradients are the same as
/// without codes.
#[test]
fn quantized_by_one_scale_has_all_that_goes_with_it() {
    let (folder, y) = folder(Norm::Rms, true);
    let args = ["--codes", "e4m3", "--scale", "tensor", "--transposed", "1", "--keep-y", "1"];
    let bytes = run(&folder, &args);
    let out = SafeTensors::deserialize(&bytes).unwrap();
    let expected =
        "amax F32 [1], codes F8_E4M3 [2, 3, 150], codes_t F8_E4M3 [150, 6], rstd F32 [2, 3], y F32 [2, 3, 150]";
    assert_eq!(described(&out), expected);
    let codes = out.tensor("codes").unwrap();
    let direct: Vec<u8> = y.iter().map(|y| CodeType::E4m3.encode(y / 0.03125)).collect();
    assert_eq!(codes.data(), direct);
    let transposed: Vec<u8> =
        (0..COLS).flat_map(|col| (0..ROWS).map(move |row| (row, col))).map(|(r, c)| direct[r * COLS + c]).collect();
    assert_eq!(out.tensor("codes_t").unwrap().data(), transposed);
    assert_eq!(floats(&out.tensor("y").unwrap()), y);
    let amax = y.iter().fold(0.0, |amax: f32, y| amax.max(y.abs()));
    assert_eq!(floats(&out.tensor("amax").unwrap()), [amax]);
}

#[test]
fn quantized_settings_that_make_no_sense_are_refused_in_a_line() {
    let (folder, _) = folder(Norm::Rms, true);
    for (args, text) in [
        (&["--scale", "row"][..], "applies to quantized results: pass --codes"),
        (&["--codes", "fp8"], r#"--codes: expected e4m3, e5m2 or int8, got "fp8""#),
        (&["--codes", "e4m3", "--scale", "column"], "--scale: expected tensor, current, row, block128, block64 or mx"),
        (&["--codes", "e4m3", "--scale", "block64", "--pow2", "yes"], "--pow2: expected 0 or 1"),
        (&["--codes", "e4m3", "--scale", "row", "--pow2", "1"], "pow2 applies to scale block128 or block64: "),
        (&["--codes", "e4m3", "--scale", "row", "--mx-rounding", "up"], "mx_rounding applies to scale mx: "),
        (&["--codes", "int8", "--scale", "mx"], "MX has codes of floating point, got int8"),
        (&["--codes", "e4m3", "--amax-floor=-1"], "the floor of amax is finite and not negative, got -1"),
        (&["--codes", "e4m3", "--scale", "row"], "scale must not be given"),
        (&["--codes", "e4m3", "--scale", "tensor", "--columnwise", "1"], "only ScaleKind::Block and ScaleKind::Mx"),
    ] {
        let outcome = folder.rmsnorm(&[&["run", "in", "-o", "out"], args].concat());
        assert_eq!(outcome.code, Some(2), "{args:?}: {}", outcome.stderr);
        assert!(outcome.stderr.contains(text) && outcome.stderr.lines().count() == 1, "{args:?}: {}", outcome.stderr);
    }
}
