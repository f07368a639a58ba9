//! The entries that PTX text declares: names, and how their parameters are laid out.

/// A kernel as declared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) name: String,
    /// Offset and size of each parameter.
    pub(crate) parameters: Vec<(usize, usize)>,
}

/// All entries; `None` for text that is no PTX.
pub(crate) fn entries(text: &str) -> Option<Vec<Entry>> {
    let text = without_comments(text);
    text.trim_start().strip_prefix(".version")?;
    let mut found = Vec::new();
    let mut rest = text.as_str();
    while let Some(at) = rest.find(".entry") {
        rest = rest[at + ".entry".len()..].trim_start();
        let end = rest.find(|c: char| !(c.is_ascii_alphanumeric() || "_$%".contains(c)))?;
        let name = &rest[..end];
        rest = rest[end..].trim_start();
        let mut parameters = Vec::new();
        if let Some(list) = rest.strip_prefix('(') {
            let close = list.find(')')?;
            parameters = layout(&list[..close])?;
            rest = &list[close..];
        }
        if name.is_empty() {
            return None;
        }
        found.push(Entry {
            name: name.to_owned(),
            parameters,
        });
    }
    Some(found)
}

fn without_comments(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('/') {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        let (skip, keep) = if rest.starts_with("//") {
            (rest.find('\n').unwrap_or(rest.len()), "")
        } else if rest.starts_with("/*") {
            (rest.find("*/").map_or(rest.len(), |end| end + 2), " ")
        } else {
            (1, "/")
        };
        out.push_str(keep);
        rest = &rest[skip..];
    }
    out.push_str(rest);
    out
}

/// Lays out a parameter list: each at its own alignment.
fn layout(list: &str) -> Option<Vec<(usize, usize)>> {
    let mut at: usize = 0;
    let mut laid = Vec::new();
    for parameter in list.split(',').map(str::trim).filter(|it| !it.is_empty()) {
        let mut words = parameter.split_whitespace();
        if words.next() != Some(".param") {
            return None;
        }
        let (mut size, mut align, mut count) = (None, None, 1);
        while let Some(word) = words.next() {
            match word {
                ".align" => align = Some(words.next()?.parse().ok()?),
                // `.ptr .global .align 4` says what a pointer points to, and comes behind the type.
                ".ptr" => {
                    while let Some(more) = words.next() {
                        if more == ".align" {
                            words.next();
                        } else if !more.starts_with('.') {
                            break;
                        }
                    }
                }
                kind if kind.starts_with('.') => {
                    let bits: usize = kind
                        .trim_start_matches(|c: char| !c.is_ascii_digit())
                        .parse()
                        .ok()?;
                    size = Some(bits / 8);
                }
                name => {
                    if let Some((_, bracket)) = name.split_once('[') {
                        count = bracket.trim_end_matches(']').trim().parse().ok()?;
                    }
                }
            }
        }
        let size = size.filter(|size| (1..=16).contains(size))?;
        let align = align.unwrap_or(size).max(1);
        at = at.checked_next_multiple_of(align)?;
        let bytes = size.checked_mul(count).filter(|bytes| *bytes <= 1 << 16)?;
        laid.push((at, bytes));
        at = at.checked_add(bytes)?;
    }
    Some(laid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_and_their_parameters_are_found() {
        let text = "// a comment with .entry in it\n.version 7.0\n.target sm_70\n.address_size 64\n\
            /* .entry too */ .visible .entry one(.param .u64 a, .param .u32 b,\n .param .u64 c)\n{ ret; }\n\
            .entry none() { ret; }\n\
            .visible .entry block(\n\t.param .u64 .ptr .global .align 4 p,\n\
            \t.param .align 8 .b8 s[24],\n\t.param .u8 t\n)\n.maxntid 128, 1, 1\n{ ret; }";
        let found = entries(text).unwrap();
        let names: Vec<&str> = found.iter().map(|entry| entry.name.as_str()).collect();
        assert_eq!(names, ["one", "none", "block"]);
        assert_eq!(found[0].parameters, [(0, 8), (8, 4), (16, 8)]);
        assert!(found[1].parameters.is_empty());
        assert_eq!(found[2].parameters, [(0, 8), (8, 24), (32, 1)]);
    }

    #[test]
    fn other_text_is_refused() {
        for text in [
            "",
            "hello",
            "{ .entry x() }",
            ".version 7.0 .entry (",
            ".version 7 .entry x(.param .u64",
        ] {
            assert!(entries(text).is_none(), "{text}");
        }
    }

    proptest::proptest! {
        #[test]
        fn no_text_panics(text in "(\\.version|\\.entry|\\.param|\\.align|\\.u64|\\.b8|[a-z0-9 ,()\\[\\]/*\n%.é]){0,40}") {
            let _ = entries(&format!(".version {text}"));
        }
    }
}
