//! The formats of codes, and the conversion of f32 to them (Q5).

use std::fmt;

/// The format of a code: 8 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum CodeType {
    /// OCP's E4M3, without infinities (`float8_e4m3fn`): 1 + 4 + 3 bits, bias 7, largest value 448,
    /// NaN `0x7F` and `0xFF`.
    E4m3,
    /// OCP's E5M2 (`float8_e5m2`): 1 + 5 + 2 bits, bias 15, largest value 57344, with infinities
    /// and NaN as IEEE has them.
    E5m2,
    /// An integer from -128 to 127. There is no NaN.
    Int8,
}

/// A floating-point format: the constants of a conversion with integer arithmetic.
struct Format {
    /// Bits of an f32's significand that a code drops.
    shift: u32,
    /// The biased f32 exponent of the smallest normal code.
    min_exponent: u32,
    /// The bits of the largest code's value as f32.
    largest: u32,
    /// The value of the smallest subnormal code.
    step: f32,
}

const E4M3: Format = Format { shift: 20, min_exponent: 121, largest: 0x43e0_0000, step: 1.0 / 512.0 };
const E5M2: Format = Format { shift: 21, min_exponent: 113, largest: 0x4760_0000, step: 1.0 / 65536.0 };

/// The code of NaN, in both formats.
const NAN: u8 = 0x7f;

impl CodeType {
    /// Every format, in the order of declaration.
    pub const ALL: [CodeType; 3] = [CodeType::E4m3, CodeType::E5m2, CodeType::Int8];

    /// The name used in files, test names and bench ids: `e4m3`, `e5m2` or `int8`.
    pub const fn name(self) -> &'static str {
        match self {
            CodeType::E4m3 => "e4m3",
            CodeType::E5m2 => "e5m2",
            CodeType::Int8 => "int8",
        }
    }

    /// The format of that [`name`](Self::name), if there is one.
    pub fn from_name(name: &str) -> Option<CodeType> {
        CodeType::ALL.into_iter().find(|format| format.name() == name)
    }

    /// `Q`: the value of the largest code that scales use. For int8 127, so that the range is
    /// symmetric.
    pub const fn largest(self) -> f32 {
        match self {
            CodeType::E4m3 => 448.0,
            CodeType::E5m2 => 57344.0,
            CodeType::Int8 => 127.0,
        }
    }

    /// (Q5): the code of the nearest value, ties to even. Values beyond the largest, infinities
    /// included, become the largest. NaN becomes NaN, and 0 in int8, which has no NaN.
    pub fn encode(self, value: f32) -> u8 {
        match self {
            CodeType::E4m3 => E4M3.encode(value),
            CodeType::E5m2 => E5M2.encode(value),
            // The cast saturates, and turns NaN into 0.
            CodeType::Int8 => (value.round_ties_even() as i8).cast_unsigned(),
        }
    }

    /// The value of a code, exactly.
    pub fn decode(self, code: u8) -> f32 {
        match self {
            CodeType::E4m3 if code & 0x7f == NAN => f32::NAN,
            CodeType::E4m3 => E4M3.decode(code),
            CodeType::E5m2 => match code & 0x7f {
                0..0x7c => E5M2.decode(code),
                0x7c => f32::INFINITY.copysign(sign(code)),
                _ => f32::NAN,
            },
            CodeType::Int8 => f32::from(code.cast_signed()),
        }
    }
}

impl fmt::Display for CodeType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

fn sign(code: u8) -> f32 {
    if code & 0x80 == 0 { 1.0 } else { -1.0 }
}

impl Format {
    /// With integer arithmetic only, as on devices without a conversion instruction, which may
    /// round float sums either way.
    fn encode(&self, value: f32) -> u8 {
        let sign = (value.to_bits() >> 24) as u8 & 0x80;
        if value.is_nan() {
            return sign | NAN;
        }
        let bits = (value.to_bits() & 0x7fff_ffff).min(self.largest);
        let exponent = bits >> 23;
        let code = if exponent >= self.min_exponent {
            // A carry into the exponent is right.
            half_to_even(bits, self.shift) - (((self.min_exponent - 1) << 23) >> self.shift)
        } else {
            // A shift by 25 or more drops all bits, also for a subnormal f32.
            let shift = (self.shift + self.min_exponent - exponent).min(25);
            half_to_even(bits & 0x007f_ffff | 0x0080_0000, shift)
        };
        sign | code as u8
    }

    fn decode(&self, code: u8) -> f32 {
        let mantissa_bits = 23 - self.shift;
        let magnitude = u32::from(code & 0x7f);
        let (exponent, mantissa) = (magnitude >> mantissa_bits, magnitude & ((1 << mantissa_bits) - 1));
        // In units of the smallest code; the bits of a subnormal code count them directly.
        let steps = if exponent == 0 { mantissa } else { (mantissa | 1 << mantissa_bits) << (exponent - 1) };
        sign(code) * steps as f32 * self.step
    }
}

/// Drops the lowest `shift` bits, rounding to nearest, ties to even.
const fn half_to_even(bits: u32, shift: u32) -> u32 {
    (bits + (1 << (shift - 1)) - 1 + ((bits >> shift) & 1)) >> shift
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::round_to_code;

    fn check(format: CodeType, value: f32) {
        let (code, expected) = (format.encode(value), round_to_code(f64::from(value), format));
        let got = f64::from(format.decode(code));
        assert!(got == expected, "{value:e} in {format}: {code:#x} is {got}, not {expected}");
    }

    /// Every sign, exponent and leading bit, followed by 0, 1, half or all of the remaining bits.
    /// Results depend on no other bits.
    #[test]
    fn every_value_becomes_the_nearest_code() {
        for format in CodeType::ALL {
            for leading in 0..1u32 << 15 {
                for rest in [0, 1, 0xffff, 0x1_0000, 0x1_0001, 0x1_ffff] {
                    let value = f32::from_bits(leading << 17 | rest);
                    if !value.is_nan() {
                        check(format, value);
                    }
                }
            }
        }
    }

    #[test]
    fn every_code_is_the_code_of_its_value() {
        for format in CodeType::ALL {
            for code in 0..=u8::MAX {
                let value = format.decode(code);
                if value.is_nan() {
                    assert!(format.decode(format.encode(value)).is_nan(), "{format} {code:#x}");
                } else if value.is_finite() {
                    assert_eq!(format.encode(value), code, "{format} {code:#x}");
                }
            }
        }
    }

    /// As the formats define it, also where casts of other libraries differ.
    #[test]
    fn what_has_no_code_is_the_largest_or_nan() {
        let codes = |value| CodeType::ALL.map(|format| format.encode(value));
        assert_eq!(codes(f32::INFINITY), [0x7e, 0x7b, 0x7f]);
        assert_eq!(codes(f32::NEG_INFINITY), [0xfe, 0xfb, 0x80]);
        assert_eq!(codes(f32::MAX), [0x7e, 0x7b, 0x7f]);
        assert_eq!(codes(f32::NAN), [0x7f, 0x7f, 0]);
        assert_eq!(codes(-f32::NAN), [0xff, 0xff, 0]);
        assert_eq!(codes(-0.0), [0x80, 0x80, 0]);
        // 464 is halfway to the next value that E4M3 lacks, and 61440 in E5M2.
        assert_eq!([448.0, 464.0, 465.0, 1e9].map(|value| CodeType::E4m3.encode(value)), [0x7e; 4]);
        assert_eq!([57344.0, 61439.0, 61440.0].map(|value| CodeType::E5m2.encode(value)), [0x7b; 3]);
        assert_eq!(
            [126.5, 127.0, 127.5, -128.0, -128.5].map(|value| CodeType::Int8.encode(value)),
            [126, 127, 127, 128, 128]
        );
    }

    #[test]
    fn codes_have_the_values_of_their_formats() {
        let e4m3 =
            [(0x00, 0.0), (0x01, 2f32.powi(-9)), (0x07, 7.0 * 2f32.powi(-9)), (0x08, 2f32.powi(-6)), (0x38, 1.0)];
        for (code, value) in e4m3.into_iter().chain([(0x39, 1.125), (0x7e, 448.0), (0xb8, -1.0), (0xfe, -448.0)]) {
            assert_eq!(CodeType::E4m3.decode(code), value, "{code:#x}");
        }
        let e5m2 = [(0x01, 2f32.powi(-16)), (0x03, 3.0 * 2f32.powi(-16)), (0x04, 2f32.powi(-14)), (0x3c, 1.0)];
        for (code, value) in e5m2.into_iter().chain([(0x3d, 1.25), (0x7b, 57344.0), (0x7c, f32::INFINITY)]) {
            assert_eq!(CodeType::E5m2.decode(code), value, "{code:#x}");
        }
        assert_eq!(CodeType::E5m2.decode(0xfc), f32::NEG_INFINITY);
        for (format, code) in
            [(CodeType::E4m3, 0x7f), (CodeType::E4m3, 0xff), (CodeType::E5m2, 0x7d), (CodeType::E5m2, 0xff)]
        {
            assert!(format.decode(code).is_nan(), "{format} {code:#x}");
        }
        assert_eq!([0, 1, 127, 128, 255].map(|code| CodeType::Int8.decode(code)), [0.0, 1.0, 127.0, -128.0, -1.0]);
    }

    #[test]
    fn formats_are_found_by_their_names() {
        for format in CodeType::ALL {
            assert_eq!(CodeType::from_name(format.name()), Some(format));
            assert_eq!(format.to_string(), format.name());
            assert_eq!(format.decode(format.encode(format.largest())), format.largest());
        }
        assert_eq!((CodeType::from_name("E4M3"), CodeType::from_name("")), (None, None));
    }
}
