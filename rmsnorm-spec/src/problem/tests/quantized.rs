//! Quantized calls: the tensors of each kind of scale, their types, and the number of scales.

use super::*;
use crate::quant::ScaleLayout;

type Args<'a, C> = QuantizedForward<'a, Numbers, f32, C>;

const KINDS: [ScaleKind; 6] = [
    ScaleKind::Given,
    ScaleKind::Current,
    ScaleKind::Row,
    ScaleKind::Block { cols: 128, is_power_of_two: false },
    ScaleKind::Block { cols: 64, is_power_of_two: true },
    ScaleKind::Mx { rounding: ScaleRounding::Floor },
];

fn view<E>(allocation: u64, len: usize) -> View<E> {
    View { span: Span { allocation, start: 0, len }, element: PhantomData }
}

/// The tensors that every call has.
fn args<'a, C: Code>(quant: QuantSpec, (rows, cols): (usize, usize)) -> Args<'a, C> {
    QuantizedForward::new(quant, view(1, rows * cols), view(2, rows * cols))
}

/// Adds the scales that `quant` requires.
fn with_scales<'a, C: Code>(args: Args<'a, C>, (rows, cols): (usize, usize)) -> Args<'a, C> {
    let len = args.quant.scales_len(rows, cols).expect("few");
    match (args.quant.scale, args.quant.scale_type()) {
        (ScaleKind::Given, _) => args.scale(view(3, 1)),
        (_, ScaleType::F32) => args.scales(view(3, len)),
        (_, ScaleType::E8m0) => args.scales_e8m0(view(3, len)),
    }
}

fn check<C: Code>(args: Args<'_, C>, (rows, cols): (usize, usize)) -> Result<Problem, Error> {
    Checked::quantized_forward(NormSpec::rms(rows, cols, 1e-5), args).map(|checked| *checked.problem())
}

const SHAPE: (usize, usize) = (5, 300);

/// The table in the documentation of [`QuantizedForward`].
#[test]
fn each_kind_of_scale_has_its_tensors_and_no_other() {
    for kind in KINDS {
        let quant = QuantSpec::new(CodeType::Int8, kind);
        let quant =
            if matches!(kind, ScaleKind::Mx { .. }) { QuantSpec { codes: CodeType::E4m3, ..quant } } else { quant };
        let (is_given, is_one) = (kind == ScaleKind::Given, matches!(kind, ScaleKind::Given | ScaleKind::Current));
        let unexpected = |answer: Result<Problem, Error>, name: &str| matches!(answer, Err(Error::Unexpected { arg, .. }) if arg == name);
        let missing = |answer: Result<Problem, Error>, name: &str| matches!(answer, Err(Error::Missing { arg, .. }) if arg == name);
        fn all<C: Code>(
            quant: QuantSpec,
            (is_given, is_one): (bool, bool),
            unexpected: impl Fn(Result<Problem, Error>, &str) -> bool,
            missing: impl Fn(Result<Problem, Error>, &str) -> bool,
        ) {
            let kind = quant.scale;
            let good = || with_scales(args::<C>(quant, SHAPE), SHAPE);
            let problem = check(good(), SHAPE).expect("a good call");
            let scales = if is_given { Tensor::Scale } else { Tensor::Scales };
            assert_eq!(problem.tensors, TensorSet::of(&[Tensor::X, Tensor::Codes, scales]), "{kind:?}");
            assert_eq!((problem.direction, problem.quant), (Direction::QuantizedForward, Some(quant)), "{kind:?}");
            let made = Problem::quantized_forward(Norm::Rms, SHAPE.0, SHAPE.1, DType::F32, quant, &[]);
            assert_eq!(problem, made, "{kind:?}");

            let without = check(args::<C>(quant, SHAPE), SHAPE);
            assert!(missing(without, scales.name()), "{kind:?}");
            let both = if is_given { good().scales(view(9, 1)) } else { good().scale(view(9, 1)) };
            assert!(unexpected(check(both, SHAPE), if is_given { "scales" } else { "scale" }), "{kind:?}");
            let amax = check(good().amax(view(9, 1)), SHAPE);
            assert!(if is_given { amax.is_ok() } else { unexpected(amax, "amax") }, "{kind:?}");
            let transposed = check(good().codes_t(view(9, SHAPE.0 * SHAPE.1)), SHAPE);
            assert!(if is_one { transposed.is_ok() } else { unexpected(transposed, "codes_t") }, "{kind:?}");
            let folded = args::<C>(quant.folds_amax(), SHAPE);
            let answer = check(with_scales(folded, SHAPE), SHAPE);
            let is_refused = matches!(&answer, Err(Error::InvalidArgument { arg: "quant", .. }));
            assert!(if is_given { missing(answer, "amax") } else { is_refused }, "{kind:?}");
        }
        match quant.codes {
            CodeType::E4m3 => all::<F8E4M3>(quant, (is_given, is_one), unexpected, missing),
            CodeType::E5m2 => all::<F8E5M2>(quant, (is_given, is_one), unexpected, missing),
            CodeType::Int8 => all::<i8>(quant, (is_given, is_one), unexpected, missing),
        }
    }
}

#[test]
fn codes_and_scales_have_the_types_that_the_spec_says() {
    let row = QuantSpec::new(CodeType::E4m3, ScaleKind::Row);
    for other in [CodeType::E5m2, CodeType::Int8] {
        let answer = check(with_scales(args::<F8E4M3>(QuantSpec { codes: other, ..row }, SHAPE), SHAPE), SHAPE);
        assert!(matches!(answer, Err(Error::InvalidArgument { arg: "codes", .. })), "{other}: {answer:?}");
    }
    let refuses = |answer: Result<Problem, Error>| matches!(answer, Err(Error::InvalidArgument { arg: "scales", .. }));
    assert!(refuses(check(args::<F8E4M3>(row, SHAPE).scales_e8m0(view(3, SHAPE.0)), SHAPE)));
    let mx = QuantSpec::new(CodeType::E4m3, ScaleKind::Mx { rounding: ScaleRounding::Up });
    assert!(refuses(check(args::<F8E4M3>(mx, SHAPE).scales(view(3, SHAPE.0 * 10)), SHAPE)));
    // An inconsistent spec is refused before any tensor is checked.
    let odd = QuantSpec::new(CodeType::E4m3, ScaleKind::Block { cols: 100, is_power_of_two: false });
    let answer = check(args::<F8E4M3>(odd, SHAPE), SHAPE);
    assert!(matches!(answer, Err(Error::InvalidArgument { arg: "quant", .. })), "{answer:?}");
}

/// The number of scales includes the padding, and no other number is accepted.
#[test]
fn scales_are_as_many_as_their_layout_has() {
    let block = QuantSpec::new(CodeType::E4m3, ScaleKind::Block { cols: 128, is_power_of_two: true });
    let mx = QuantSpec::new(CodeType::E4m3, ScaleKind::Mx { rounding: ScaleRounding::Up });
    for (quant, len) in [
        (QuantSpec::new(CodeType::E4m3, ScaleKind::Current), 1),
        (QuantSpec::new(CodeType::E4m3, ScaleKind::Row), 5),
        (block, 15),
        (block.layout(ScaleLayout::ColumnMajor { ld: 8 }), 24),
        (block.layout(ScaleLayout::PackedUe8m0 { ld: 8 }), 32),
        (mx, 50),
        (mx.layout(ScaleLayout::PackedUe8m0 { ld: 5 }), 60),
        (mx.layout(ScaleLayout::Swizzled128x4), 3 * 512),
    ] {
        for (got, is_good) in [(len - 1, false), (len, true), (len + 1, false)] {
            let args = args::<F8E4M3>(quant, SHAPE);
            let args = match quant.scale_type() {
                ScaleType::F32 => args.scales(view(3, got)),
                ScaleType::E8m0 => args.scales_e8m0(view(3, got)),
            };
            match check(args, SHAPE) {
                Ok(_) => assert!(is_good, "{got} in {quant:?}"),
                Err(Error::Length { arg: "scales", min, max, got: told }) => {
                    assert!(!is_good && (min, max, told) == (len, len, got), "{quant:?}");
                }
                Err(error) => panic!("{quant:?}: {error}"),
            }
        }
    }
    let short =
        check(args::<F8E4M3>(block.layout(ScaleLayout::ColumnMajor { ld: 4 }), SHAPE).scales(view(3, 12)), SHAPE);
    let rule = "scales: the layout ColumnMajor { ld: 4 } must have ld >= rows and a length that fits usize, got 5 rows of 300 columns";
    assert_eq!(short.expect_err("no room for 5 rows").to_string(), rule);
    assert_eq!(QuantSpec::new(CodeType::E4m3, ScaleKind::Given).scales_len(5, 300), Some(0));
}

#[test]
fn transposed_codes_have_columns_for_rows() {
    let quant = QuantSpec::new(CodeType::E4m3, ScaleKind::Given);
    let (rows, cols) = SHAPE;
    let transposed =
        |codes_t: Rows<View<F8E4M3>>| check(with_scales(args::<F8E4M3>(quant, SHAPE), SHAPE).codes_t(codes_t), SHAPE);
    assert!(transposed(Rows::strided(view(9, (cols - 1) * 16 + rows), 16)).is_ok());
    let narrow = transposed(Rows::strided(view(9, rows * cols), rows - 1));
    assert!(matches!(narrow, Err(Error::Stride { arg: "codes_t", cols: 5, got: 4 })), "{narrow:?}");
    let short = transposed(Rows::strided(view(9, (cols - 1) * 16 + rows - 1), 16));
    assert!(matches!(short, Err(Error::Length { arg: "codes_t", .. })), "{short:?}");
    // An empty batch has no codes, at any stride.
    let empty = (0, cols);
    let args = with_scales(args::<F8E4M3>(quant, empty), empty).codes_t(Rows::strided(view(9, 0), 16));
    assert!(check(args, empty).is_ok());
    let grouped = transposed(Rows::grouped(view(9, rows * cols), rows, RowGroups { rows: 10, stride: 10 * rows }));
    assert!(matches!(grouped, Err(Error::InvalidArgument { arg: "codes_t", .. })), "{grouped:?}");
}

/// Scales as for a matrix of 300 rows and 5 columns; the call must store the statistics.
#[test]
fn a_copy_along_columns_has_its_scales_and_statistics() {
    let (rows, cols) = SHAPE;
    let block = QuantSpec::new(CodeType::E4m3, ScaleKind::Block { cols: 128, is_power_of_two: true });
    let mx = QuantSpec::new(CodeType::E4m3, ScaleKind::Mx { rounding: ScaleRounding::Up });
    let packed = block.columnwise_layout(ScaleLayout::PackedUe8m0 { ld: 300 });
    let swizzled = mx.columnwise_layout(ScaleLayout::Swizzled128x4);
    let plain = |quant| with_scales(args::<F8E4M3>(quant, SHAPE), SHAPE).rstd(view(4, rows));
    let with_codes = |quant| plain(quant).codes_columnwise(view(5, rows * cols));
    let ends = [(block, 300), (block.columnwise_layout(ScaleLayout::ColumnMajor { ld: 304 }), 304)];
    for (quant, len) in ends.into_iter().chain([(packed, 1200), (mx, 300), (swizzled, 3 * 512)]) {
        let bytes = quant.columnwise().scale_type() == ScaleType::E8m0;
        let good = |len| match bytes {
            true => with_codes(quant).scales_columnwise_e8m0(view(6, len)),
            false => with_codes(quant).scales_columnwise(view(6, len)),
        };
        let problem = check(good(len), SHAPE).expect("a good call");
        assert!(problem.has(Tensor::CodesColumnwise) && problem.has(Tensor::ScalesColumnwise), "{quant:?}");
        let long = check(good(len + 1), SHAPE);
        assert!(matches!(long, Err(Error::Length { arg: "scales_columnwise", .. })), "{quant:?}: {long:?}");
        let other = match bytes {
            true => with_codes(quant).scales_columnwise(view(6, len)),
            false => with_codes(quant).scales_columnwise_e8m0(view(6, len)),
        };
        let answer = check(other, SHAPE);
        assert!(
            matches!(answer, Err(Error::InvalidArgument { arg: "scales_columnwise", .. })),
            "{quant:?}: {answer:?}"
        );
    }

    let missing = |answer, name| matches!(answer, Err(Error::Missing { arg, .. }) if arg == name);
    assert!(missing(check(with_codes(block), SHAPE), "scales_columnwise"));
    let alone = check(plain(block).scales_columnwise(view(6, 300)), SHAPE);
    assert!(matches!(alone, Err(Error::Unexpected { arg: "scales_columnwise", .. })), "{alone:?}");
    let without = QuantizedForward { rstd: None, ..with_codes(block).scales_columnwise(view(6, 300)) };
    assert!(missing(check(without, SHAPE), "rstd"));
    let layer = NormSpec::layer(rows, cols, 1e-5);
    let of_layer = |args| Checked::quantized_forward(layer, args).map(|checked| *checked.problem());
    assert!(missing(of_layer(with_codes(block).scales_columnwise(view(6, 300))), "mean"));
    assert!(of_layer(with_codes(block).scales_columnwise(view(6, 300)).mean(view(7, rows))).is_ok());

    for kind in [ScaleKind::Given, ScaleKind::Current, ScaleKind::Row] {
        let answer = check(with_codes(QuantSpec::new(CodeType::E4m3, kind)).scales_columnwise(view(6, 300)), SHAPE);
        assert!(matches!(answer, Err(Error::Unexpected { arg: "codes_columnwise", .. })), "{kind:?}: {answer:?}");
    }
    let odd = check(plain(block.columnwise_layout(ScaleLayout::Swizzled128x4)), SHAPE);
    assert!(matches!(odd, Err(Error::InvalidArgument { arg: "quant", .. })), "{odd:?}");
    let groups = RowGroups { rows: 10, stride: 10 * rows };
    let grouped = plain(block).codes_columnwise(Rows::grouped(view(5, rows * cols), rows, groups));
    let answer = check(grouped.scales_columnwise(view(6, 300)), SHAPE);
    assert!(matches!(answer, Err(Error::InvalidArgument { arg: "codes_columnwise", .. })), "{answer:?}");
}

/// Specs that differ in any field differ as keys of plans.
#[test]
fn specs_are_equal_in_every_part_or_not_at_all() {
    let spec = QuantSpec::new(CodeType::E4m3, ScaleKind::Row);
    let others = [
        QuantSpec { codes: CodeType::E5m2, ..spec },
        QuantSpec { scale: ScaleKind::Current, ..spec },
        spec.source(crate::quant::QuantSource::Rounded),
        spec.layout(ScaleLayout::Swizzled128x4),
        spec.columnwise_layout(ScaleLayout::Swizzled128x4),
        spec.amax_floor(1.0),
        spec.amax_ceiling(1.0),
        spec.folds_amax(),
    ];
    for (index, other) in others.into_iter().enumerate() {
        assert_ne!(spec, other);
        assert!(others.iter().skip(index + 1).all(|another| other != *another), "{other:?}");
        assert_eq!(other, other);
    }
}

#[test]
fn a_tensor_given_before_its_dtype_changes_is_named() {
    let quant = QuantSpec::new(CodeType::E4m3, ScaleKind::Row);
    type Half<'a> = QuantizedForward<'a, Numbers, f16, F8E4M3>;
    let half = || Half::new(quant, view(1, 4), view(2, 4)).scales(view(3, 2));
    let lost = |name: &str, answer: Result<(), Error>| {
        assert!(matches!(answer, Err(Error::Unexpected { arg, .. }) if arg == name), "{name}: {answer:?}");
    };
    let spec = NormSpec::rms(2, 2, 0.0);
    let check_weight =
        |args: QuantizedForward<'_, Numbers, f16, F8E4M3, f32>| Checked::quantized_forward(spec, args).map(|_| ());
    let check_residual =
        |args: QuantizedForward<'_, Numbers, f16, F8E4M3, f16, f32>| Checked::quantized_forward(spec, args).map(|_| ());
    lost("weight", check_weight(half().weight(view(4, 2)).f32_weight()));
    lost("bias", check_weight(half().bias(view(4, 2)).f32_weight()));
    lost("residual", check_residual(half().residual(view(4, 4)).f32_residual()));
    lost("residual_out", check_residual(half().residual_out(view(4, 4)).f32_residual()));
    assert!(check_weight(half().f32_weight().weight(view(4, 2)).bias(view(5, 2))).is_ok());
    assert!(check_residual(half().f32_residual().residual(view(4, 4)).residual_out(view(5, 4))).is_ok());
}

#[test]
fn a_backend_without_quantized_results_says_so() {
    let quant = QuantSpec::new(CodeType::E4m3, ScaleKind::Row);
    let answer =
        Numbers::<false>.quantized_forward(&NormSpec::rms(2, 2, 0.0), args::<F8E4M3>(quant, (2, 2)).scales(view(3, 2)));
    let rule = "the numbers backend has no quantized results";
    assert!(matches!(&answer, Err(Error::Unsupported { rule: told }) if told == rule), "{answer:?}");
    let debug = format!("{:?}", args::<F8E4M3>(quant, (2, 2)).scales(view(3, 2)));
    assert!(debug.starts_with("QuantizedForward { quant: QuantSpec {"), "{debug}");
    assert!(debug.ends_with("x: f32[4], codes: e4m3[4], scales: f32[2] }"), "{debug}");
}
