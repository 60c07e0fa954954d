//! A quantized result: math.md, section 10. [`scales`] and [`codes`] have its f32 arithmetic, and
//! [`QuantizedTruth`](crate::judge::quantized::QuantizedTruth) its bounds.

mod codes;
mod scales;

use rmsnorm_spec::quant::{CodeType, QuantSource, QuantSpec, ScaleKind, ScaleLayout};
use rmsnorm_spec::{CastOrder, DType, DTypes, Norm, Tensor, TensorSet};

use super::math::{
    Bug, BugList, Call, Case, Dice, Family, ForwardRow, GoodCall, Kind, Layout, Lists, Misuse, PieceMath, Refusal,
    Tensors, Trial, each, is_meaningful, presence,
};
use crate::case::quantized::SCALES;

/// The piece.
pub(crate) struct Quantize;

impl PieceMath for Quantize {
    const BUGS: &'static [Bug] = scales::QuantizeBug::BUGS;
    /// On a GPU each columnwise case compiles another program, so the smoke profile has only some.
    const LISTS: Lists = Lists {
        smoke: || smoke().into_iter().chain(columnwise(14, 1, 1 << 11).into_iter().step_by(5)).collect(),
        core: || [core(), columnwise(15, 4, 1 << 15)].concat(),
        drawn: |seed| [drawn(seed, 4000), columnwise(seed, 20, 1 << 13)].concat(),
        ..Lists::NONE
    };
    const MISUSE: &'static [Misuse] = &[
        ("no_scale", Refusal::Missing("scale"), |call| call.lose(Tensor::Scale)),
        ("transposed_codes_of_rows", Refusal::Unexpected("codes_t"), |call| call.call.quant = Some(OF_ROWS)),
        ("scale_given_for_rows", Refusal::Unexpected("scale"), |call| {
            call.lose(Tensor::CodesT);
            call.call.quant = Some(OF_ROWS);
        }),
        ("negative_floor", Refusal::Invalid("quant"), |call| {
            call.call.quant = call.call.quant.map(|quant| quant.amax_floor(-1.0));
        }),
        ("sum_after", Refusal::Unsupported, GoodCall::add_after),
    ];

    fn forward(call: &Call, tensors: &mut Tensors<'_, '_>, rows: &mut [ForwardRow]) {
        if let Some(quant) = call.problem.quant {
            codes::run(call, tensors, quant, rows);
        }
    }
}

const OF_ROWS: QuantSpec = QuantSpec::new(CodeType::E5m2, ScaleKind::Row);

const COLS: [usize; 19] = [1, 3, 31, 32, 33, 60, 63, 64, 65, 127, 128, 129, 255, 256, 300, 512, 1023, 1024, 4099];
const ROWS: [usize; 9] = [0, 1, 2, 3, 5, 31, 64, 129, 257];

impl Dice {
    /// A layout for the scales of `rows` rows.
    fn scale_layout(&mut self, rows: usize) -> ScaleLayout {
        let ld = rows.next_multiple_of(4) + self.pick(&[0, 0, 4, 1]);
        self.pick(&[
            ScaleLayout::RowMajor,
            ScaleLayout::ColumnMajor { ld },
            ScaleLayout::PackedUe8m0 { ld },
            ScaleLayout::Swizzled128x4,
        ])
    }

    fn quant(&mut self, scale: ScaleKind, codes: CodeType, rows: usize) -> QuantSpec {
        let mut quant = QuantSpec::new(codes, scale).source(self.pick(&[QuantSource::F32, QuantSource::Rounded]));
        quant = quant.layout(self.scale_layout(rows));
        match self.roll() % 6 {
            0 => quant = quant.amax_floor(self.pick(&[1.0 / 512.0, 2.5, 100.0])),
            1 => quant = quant.amax_ceiling(self.pick(&[0.3, 1.7, 4.0])),
            2 => quant = quant.amax_floor(1.5).amax_ceiling(2.5),
            _ => {}
        }
        if self.one_in(3) { quant.folds_amax() } else { quant }
    }

    fn quantized(&mut self, norm: Norm, scale: ScaleKind, codes: CodeType, most_elements: usize) -> Case {
        let size = loop {
            let (rows, cols) = (self.pick(&ROWS), self.pick(&COLS));
            if rows * cols <= most_elements {
                break (rows, cols);
            }
        };
        let case = self.case_of_size(size);
        let of_codes = [Tensor::Y, Tensor::CodesT, Tensor::Amax].into_iter().filter(|_| self.one_in(2));
        let present = of_codes.collect::<TensorSet>().union(case.present);
        let quant = Some(self.quant(scale, codes, case.rows));
        let family = if self.one_in(5) { Family::Codes } else { case.family };
        let layout = if self.one_in(6) { Layout::Grouped { rows: 2, seed: case.seed } } else { case.layout };
        let case = Case { kind: Kind::QUANTIZED_FORWARD, norm, quant, present, family, layout, ..case };
        exact_where_asked(case)
    }
}

/// In the family `Codes`: a power of two columns, no eps, no offset and no bias. x has one
/// magnitude, so if the stored rstd is 1, y is exactly the weight.
fn exact_where_asked(case: Case) -> Case {
    if case.family != Family::Codes {
        return case;
    }
    let present = case.present.with(Tensor::Weight).with(Tensor::Rstd).without(Tensor::Bias).without(Tensor::Residual);
    let (norm, cols, cast_order) = (Norm::Rms, case.cols.next_power_of_two(), CastOrder::AtStore);
    Case { norm, cols, eps: 0.0, weight_offset: 0.0, present, cast_order, ..case }
}

fn formats_and_scales() -> impl Iterator<Item = (CodeType, ScaleKind)> {
    let of_codes = |codes| SCALES.map(|scale| (codes, scale));
    CodeType::ALL.into_iter().flat_map(of_codes).filter(|(codes, scale)| QuantSpec::new(*codes, *scale).check().is_ok())
}

/// `count` cases for every format, kind of scale and norm, with the other axes drawn.
fn every_scale(seed: u64, count: usize, most_elements: usize) -> Vec<Case> {
    let mut dice = Dice { state: seed };
    let mut cases = Vec::new();
    for ((codes, scale), norm) in each(formats_and_scales(), Norm::USUAL) {
        let draw = || dice.quantized(norm, scale, codes, most_elements);
        cases.extend(std::iter::repeat_with(draw).filter(is_meaningful).take(count));
    }
    cases
}

/// One case for every format and kind of scale, and the values on the steps of each format.
pub(crate) fn smoke() -> Vec<Case> {
    [every_scale(11, 1, 1 << 11), every_step(3)].concat()
}

/// Many cases for every format and kind of scale, values on the steps of each format, and all mixes
/// of dtypes.
fn core() -> Vec<Case> {
    let mut cases = [every_scale(12, 10, 1 << 15), every_step(31)].concat();
    let plain = |norm, dtype, rows, cols| Case::plain(Kind::QUANTIZED_FORWARD, norm, dtype, rows, cols);
    let all = presence::ALL_PRESENT.union(presence::OF_CODES);
    for (i, scale) in SCALES.into_iter().enumerate() {
        let quant = Some(QuantSpec::new(CodeType::ALL[i % 2], scale));
        for (j, dtypes) in DTypes::ALL.into_iter().enumerate() {
            let case = plain(Norm::USUAL[(i + j) % 2], dtypes.activation, 5, 300);
            let layout = Layout::Mixed(j as u32);
            cases.push(Case { dtypes, quant, present: all, weight_offset: 0.3, layout, ..case });
        }
        for (j, family) in Family::ALL.into_iter().enumerate() {
            let case =
                Case { quant, present: all, family, ..plain(Norm::USUAL[j % 2], DType::ALL[(i + j) % 3], 7, 161) };
            cases.push(exact_where_asked(case));
        }
        // Long rows, many rows, and a matrix larger than a cache.
        for (rows, cols) in [(2, 17_389), (3, 65_537), (2050, 33), (1025, 4099)] {
            let case = plain(Norm::USUAL[i % 2], DType::ALL[i % 3], rows, cols);
            cases.push(Case { quant, present: all.without(Tensor::Y), ..case });
        }
        // With only a weight, as for the inputs of matrix products. A backend may have a shorter
        // kernel for these, with different row ends.
        let weight = TensorSet::of(&[Tensor::Weight, Tensor::Amax]);
        let with_codes = |j: usize| {
            let quant = QuantSpec::new(CodeType::ALL[(i + j) % 3], scale);
            Some(if quant.check().is_ok() { quant } else { QuantSpec::new(CodeType::ALL[j % 2], scale) })
        };
        for (j, family) in Family::ALL.into_iter().enumerate() {
            let case = plain(Norm::USUAL[(i + j) % 2], DType::ALL[(i + j / 2) % 3], 5, 257);
            cases.push(exact_where_asked(Case { quant: with_codes(j), present: weight, family, ..case }));
        }
        let lengths = [1000, 2048, 3000, 4096, 6144, 8192, 12_288, 16_384, 17_389];
        for (j, cols) in lengths.into_iter().enumerate() {
            let case = plain(Norm::USUAL[usize::from(j % 3 == 2)], DType::ALL[(i + j) % 3], 3, cols);
            cases.push(Case { quant: with_codes(j), present: weight, ..case });
        }
        let trial = Trial::Determinism { repeats: 3 };
        for (j, (rows, cols)) in [(257, 33), (65, 300)].into_iter().enumerate() {
            let case = plain(Norm::USUAL[j], DType::ALL[(i + j) % 3], rows, cols);
            cases.push(Case { trial, quant, present: all, layout: Layout::Mixed(i as u32), ..case });
        }
    }
    // Rows for most of 132 multiprocessors, once and twice, which a backend may transpose on chip. Two of these
    // end within a tile of 32 or 64 rows.
    let alone = all.without(Tensor::Residual).without(Tensor::ResidualOut);
    let many = [(3728, 2056), (3968, 2056), (7936, 1032), (29_584, 250)].into_iter().enumerate();
    for (i, (rows, cols)) in many {
        let quant = Some(QuantSpec::new(CodeType::ALL[i % 2], SCALES[i / 2]));
        let present = if i % 2 == 0 { alone.without(Tensor::Bias).without(Tensor::Y) } else { alone };
        let case = plain(Norm::USUAL[usize::from(i == 1)], DType::ALL[(i + 1) % 3], rows, cols);
        cases.push(Case { quant, present, ..case });
    }
    cases.retain(is_meaningful);
    cases
}

/// `count` cases with a columnwise copy for each format, kind of scale and norm that supports it,
/// with the other axes drawn. Then blocks of rows that are complete, one row short, and one row too
/// long.
pub(crate) fn columnwise(seed: u64, count: usize, most_elements: usize) -> Vec<Case> {
    let mut dice = Dice { state: seed };
    let mut cases = Vec::new();
    let copied = TensorSet::of(&[Tensor::CodesColumnwise]);
    let with_copy = |dice: &mut Dice, case: Case| {
        let layout = dice.scale_layout(case.cols);
        let quant = case.quant.map(|quant| quant.columnwise_layout(layout));
        Case { quant, present: case.present.union(copied), ..case }
    };
    let of_blocks = |(codes, scale): &(CodeType, ScaleKind)| QuantSpec::new(*codes, *scale).has_columnwise();
    for (i, (codes, scale)) in formats_and_scales().filter(of_blocks).enumerate() {
        for norm in Norm::USUAL {
            let draw = || {
                let case = dice.quantized(norm, scale, codes, most_elements);
                with_copy(&mut dice, case)
            };
            cases.extend(std::iter::repeat_with(draw).filter(is_meaningful).take(count));
        }
        let blocks = [(32, 33), (128, 96), (129, 64), (191, 40), (256, 8)].into_iter().enumerate();
        for (j, (rows, cols)) in blocks.filter(|(_, (rows, cols))| rows * cols <= most_elements) {
            let quant = Some(QuantSpec::new(codes, scale));
            let present = copied.with(Tensor::Weight);
            // 191 rows with a stride of 192: columns are whole vectors apart, and end within a
            // vector.
            let layout = Layout::Uniform { pad: usize::from(rows == 191), offset: 0 };
            let case = Case::plain(Kind::QUANTIZED_FORWARD, Norm::USUAL[(i + j) % 2], DType::ALL[j % 3], rows, cols);
            cases.push(with_copy(&mut dice, Case { quant, present, layout, ..case }));
        }
    }
    cases.retain(is_meaningful);
    cases
}

/// Every format and kind of scale on the values of [`hard_weight`].
fn every_step(rows: usize) -> Vec<Case> {
    let mut cases = Vec::new();
    for (i, (codes, scale)) in formats_and_scales().enumerate() {
        for (j, source) in [QuantSource::F32, QuantSource::Rounded].into_iter().enumerate() {
            let dtypes = DTypes::uniform(DType::ALL[(i + j) % 3]).widened(true, false);
            let quant = Some(QuantSpec::new(codes, scale).source(source));
            let present = TensorSet::of(&[Tensor::Weight, Tensor::Y, Tensor::Amax, Tensor::CodesT, Tensor::Rstd]);
            let plain = Case::plain(Kind::QUANTIZED_FORWARD, Norm::Rms, dtypes.activation, rows, 512);
            cases.push(Case { dtypes, quant, present, family: Family::Codes, seed: i as u32, eps: 0.0, ..plain });
        }
    }
    cases
}

/// About `count` drawn cases.
pub(crate) fn drawn(seed: u64, count: usize) -> Vec<Case> {
    every_scale(seed ^ 0x9a_47, count.div_ceil(2 * formats_and_scales().count()), 1 << 13)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_say_how_a_case_is_quantized() {
        let plain = Case::plain(Kind::QUANTIZED_FORWARD, Norm::Rms, DType::F32, 3, 17).normalized();
        assert!(plain.to_string().ends_with(":seed1:e4m3,row,f32,row_major,floor0e0,ceilinginf"), "{plain}");
        let id = plain.to_string();
        for (from, to) in [
            (":e4m3,row,f32,row_major,floor0e0,ceilinginf", ""),
            ("e4m3", "e3m4"),
            ("row,", "column,"),
            (",f32,row", ",f16,row"),
            ("row_major", "row"),
            ("floor0e0", "floor0"),
            ("ceilinginf", "ceilinginf,fold"),
            ("ceilinginf", "ceilingNaN"),
            ("row_major", "swizzled128x4"),
        ] {
            let parsed: Result<Case, _> = id.replacen(from, to, 1).parse();
            assert!(parsed.is_err(), "{from} -> {to}: {parsed:?}");
        }
        let lists = [core(), smoke(), drawn(3, 100), columnwise(4, 3, 1 << 12)].concat();
        for case in lists.into_iter().map(Case::normalized) {
            assert_eq!(case.to_string().parse(), Ok(case));
            assert!(case.quant.is_some_and(|quant| quant.check().is_ok()), "{case}");
        }
    }

    /// Every value of every axis occurs, and so do layouts with padding.
    #[test]
    fn core_has_every_way_to_quantize() {
        let cases: Vec<Case> = core().into_iter().map(Case::normalized).collect();
        let quants: Vec<QuantSpec> = cases.iter().filter_map(|case| case.quant).collect();
        for (codes, scale) in formats_and_scales() {
            for source in [QuantSource::F32, QuantSource::Rounded] {
                let has = |quant: &&QuantSpec| (quant.codes, quant.scale, quant.source) == (codes, scale, source);
                assert!(quants.iter().filter(has).count() > 3, "{codes} {scale:?} {source:?}");
            }
        }
        let count = |is: fn(&QuantSpec) -> bool| quants.iter().filter(|quant| is(quant)).count();
        assert!(count(|quant| matches!(quant.layout, ScaleLayout::ColumnMajor { .. })) > 10);
        assert!(count(|quant| matches!(quant.layout, ScaleLayout::PackedUe8m0 { .. })) > 10);
        assert!(count(|quant| quant.layout == ScaleLayout::Swizzled128x4) > 10);
        assert!(count(|quant| quant.folds_amax) > 5 && count(|quant| quant.amax_floor > 0.0) > 20);
        assert!(count(|quant| quant.amax_ceiling.is_finite()) > 20);
        for tensor in presence::OF_CODES.iter() {
            assert!(cases.iter().filter(|case| case.present.has(tensor)).count() > 20, "{tensor}");
        }
        let copied: Vec<Case> = columnwise(13, 5, 1 << 15).into_iter().map(Case::normalized).collect();
        assert!(copied.iter().all(|case| case.present.has(Tensor::CodesColumnwise) && case.present.has(Tensor::Rstd)));
        let count = |is: fn(ScaleLayout) -> bool| {
            copied.iter().filter(|case| case.quant.is_some_and(|quant| is(quant.columnwise_layout))).count()
        };
        assert!(count(|layout| matches!(layout, ScaleLayout::ColumnMajor { .. })) > 10);
        assert!(count(|layout| matches!(layout, ScaleLayout::PackedUe8m0 { .. })) > 10);
        assert!(count(|layout| layout == ScaleLayout::Swizzled128x4) > 10);
    }
}
