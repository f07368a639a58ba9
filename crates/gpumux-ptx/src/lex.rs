//! Text into tokens.

/// One token.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Token {
    /// Names, directives and instructions with all their modifiers: `%r1`, `.reg`, `ld.global.u32`.
    Word(String),
    /// A whole number, or the bits of a float (`0f…`, `0d…`).
    Number(u64),
    /// A float with a point.
    Float(f64),
    /// Text in quotes.
    Text(String),
    /// Anything else.
    Mark(char),
}

/// All tokens with the lines they are on; or the line of what is none.
pub(crate) fn tokens(text: &str) -> Result<Vec<(Token, u32)>, u32> {
    let bytes = text.as_bytes();
    let (mut at, mut line) = (0, 1);
    let mut found = Vec::new();
    while let Some(&byte) = bytes.get(at) {
        let rest = &bytes[at..];
        let length = match byte {
            b'\n' => {
                line += 1;
                1
            }
            byte if byte.is_ascii_whitespace() || byte == 0 => 1,
            b'/' if rest.starts_with(b"//") => until(rest, b"\n"),
            b'/' if rest.starts_with(b"/*") => {
                let length = rest[2..]
                    .windows(2)
                    .position(|pair| pair == b"*/")
                    .map_or(rest.len(), |end| end + 4);
                line += rest[..length].iter().filter(|it| **it == b'\n').count() as u32;
                length
            }
            b'"' => {
                let end = rest[1..].iter().position(|it| *it == b'"').ok_or(line)?;
                let inner = String::from_utf8_lossy(&rest[1..=end]).into_owned();
                found.push((Token::Text(inner), line));
                end + 2
            }
            b'0'..=b'9' => {
                let (token, length) = number(rest).ok_or(line)?;
                found.push((token, line));
                length
            }
            byte if starts_word(byte) => {
                let length = word(rest);
                let word = String::from_utf8_lossy(&rest[..length]).into_owned();
                if word == ".loc" || word == ".file" {
                    // Where it comes from: goes to the end of the line, without a mark.
                    until(rest, b"\n")
                } else {
                    found.push((Token::Word(word), line));
                    length
                }
            }
            byte if byte.is_ascii_graphic() => {
                found.push((Token::Mark(byte as char), line));
                1
            }
            _ => return Err(line),
        };
        at += length;
    }
    Ok(found)
}

fn until(rest: &[u8], end: &[u8]) -> usize {
    rest.windows(end.len())
        .position(|it| it == end)
        .unwrap_or(rest.len())
}

fn starts_word(byte: u8) -> bool {
    byte.is_ascii_alphabetic() || b"_$%.".contains(&byte)
}

fn word(rest: &[u8]) -> usize {
    let mut length = 1;
    while let Some(byte) = rest.get(length) {
        // Directives may follow each other without a space: `.reg.b32`.
        if rest[0] == b'.' && *byte == b'.' {
            break;
        }
        let next = rest.get(length + 2).copied().unwrap_or(0);
        if starts_word(*byte) || byte.is_ascii_digit() {
            length += 1;
        } else if rest[length..].starts_with(b"::") && (starts_word(next) || next.is_ascii_digit())
        {
            length += 2;
        } else {
            break;
        }
    }
    length
}

fn number(rest: &[u8]) -> Option<(Token, usize)> {
    let digits = |from: usize, of: fn(&u8) -> bool| {
        from + rest[from..].iter().take_while(|it| of(it)).count()
    };
    let text = |from: usize, to: usize| std::str::from_utf8(&rest[from..to]).ok();
    let hexadecimal = |radix: u32, from: usize, end: usize| {
        u64::from_str_radix(text(from, end)?, radix)
            .ok()
            .map(Token::Number)
    };
    let unsigned = |end: usize| end + usize::from(rest.get(end) == Some(&b'U'));
    match rest.get(1) {
        Some(b'x' | b'X') if rest[0] == b'0' => {
            let end = digits(2, u8::is_ascii_hexdigit);
            Some((hexadecimal(16, 2, end)?, unsigned(end)))
        }
        Some(b'f' | b'F') if rest[0] == b'0' => Some((hexadecimal(16, 2, 10.min(rest.len()))?, 10)),
        Some(b'd' | b'D') if rest[0] == b'0' => Some((hexadecimal(16, 2, 18.min(rest.len()))?, 18)),
        Some(b'b' | b'B') if rest[0] == b'0' => {
            let end = digits(2, u8::is_ascii_digit);
            Some((hexadecimal(2, 2, end)?, unsigned(end)))
        }
        _ => {
            let end = digits(0, u8::is_ascii_digit);
            if rest.get(end) == Some(&b'.') && rest.get(end + 1).is_some_and(u8::is_ascii_digit) {
                let end = digits(end + 1, u8::is_ascii_digit);
                return Some((Token::Float(text(0, end)?.parse().ok()?), end));
            }
            Some((Token::Number(text(0, end)?.parse().ok()?), unsigned(end)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_numbers_and_marks() {
        let text = "// no\n@%p1 ld.shared::cta.v2.u32 {%r1, %r2}, [%rd1+-4]; .reg.b32 /* \n */ 0x1FU 0f3F800000 12 1.5 \"a b\" $L__1:\n.loc 1 2 3\nret;";
        let all = tokens(text).unwrap();
        let words: Vec<&str> = all
            .iter()
            .filter_map(|(token, _)| match token {
                Token::Word(word) => Some(word.as_str()),
                _ => None,
            })
            .collect();
        assert_eq!(
            words,
            [
                "%p1",
                "ld.shared::cta.v2.u32",
                "%r1",
                "%r2",
                "%rd1",
                ".reg",
                ".b32",
                "$L__1",
                "ret"
            ]
        );
        for token in [
            Token::Number(31),
            Token::Number(0x3F80_0000),
            Token::Number(12),
            Token::Float(1.5),
        ] {
            assert!(all.iter().any(|(it, _)| *it == token), "{token:?}");
        }
        assert!(all.contains(&(Token::Text("a b".into()), 3)));
        assert_eq!(all.last().unwrap(), &(Token::Mark(';'), 5));
        assert!(tokens("\"open").is_err() && tokens("0xg").is_err());
    }

    proptest::proptest! {
        #[test]
        fn no_text_panics(text in "\\PC{0,60}|[0-9a-fxFXdDbB.U:\"/*\n]{0,40}") {
            let _ = tokens(&text);
        }
    }
}
