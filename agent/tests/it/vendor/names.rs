//! Which of the vendor's functions concern memory, by their names, and why some of them are not
//! hooked.

use std::collections::BTreeMap;

use vramscope_agent::probes::hooks::HOOKS;

use super::{binutils, hooked_libraries, hooks_of, layer};

/// The words of a name in the vendor's spelling, without digits and version: cuGLCtxCreate_v2 is
/// GL, Ctx, Create.
fn words(name: &str) -> Option<Vec<String>> {
    let rest = name.strip_prefix("cuda").filter(|r| !r.is_empty());
    let rest = rest.or_else(|| name.strip_prefix("cu"))?;
    let letters: Vec<char> = rest.split('_').next()?.chars().collect();
    if !letters.first()?.is_ascii_uppercase() {
        return None;
    }
    let mut words: Vec<String> = Vec::new();
    let mut before = '0';
    for (index, &letter) in letters.iter().enumerate() {
        let after = letters.get(index + 1);
        let begins = letter.is_ascii_uppercase()
            && (!before.is_ascii_uppercase() || after.is_some_and(char::is_ascii_lowercase));
        before = letter;
        match words.last_mut() {
            _ if letter.is_ascii_digit() => {}
            Some(word) if !begins => word.push(letter),
            _ => words.push(letter.to_string()),
        }
    }
    Some(words)
}

/// Whether a name speaks of taking or giving memory, of handles to it, or of the context or device
/// that calls are for. Rather too often than too seldom.
fn concerns_memory(name: &str) -> bool {
    const VERBS: [&str; 26] = [
        "Alloc",
        "Malloc",
        "Free",
        "Reserve",
        "Map",
        "Mapped",
        "Unmap",
        "Register",
        "Unregister",
        "Create",
        "Destroy",
        "Release",
        "Retain",
        "Import",
        "Open",
        "Close",
        "Trim",
        "Reset",
        "Attach",
        "Detach",
        "Bind",
        "Unbind",
        "Exit",
        "Push",
        "Pop",
        "Pool",
    ];
    let Some(words) = words(name) else {
        return false;
    };
    let has = |word: &str| words.iter().any(|w| w == word);
    let is_told = !has("Get") || has("Mapped") || has("Pool");
    let verb = VERBS
        .iter()
        .chain(&["Load", "Unload"])
        .any(|verb| has(verb));
    let asks_for_free_bytes = words == ["Mem", "Get", "Info"];
    (has("Set") && (has("Ctx") || has("Device"))) || (verb && is_told) || asks_for_free_bytes
}

/// Names that are not hooked, and why.
fn not_hooked() -> BTreeMap<&'static str, &'static str> {
    let mut reason = None;
    let mut names = BTreeMap::new();
    for line in include_str!("not_hooked.txt").lines() {
        if let Some(text) = line.strip_suffix(':') {
            reason = Some(text);
        } else if !line.starts_with('#') {
            for name in line.split_whitespace() {
                let before = names.insert(name, reason.expect("a reason comes first"));
                assert_eq!(before, None, "{name} is there twice");
            }
        }
    }
    names
}

/// A new version's new function makes this fail: it wants a row in the table, or a reason.
#[test]
fn every_function_that_concerns_memory_is_hooked_or_explained() {
    let not_hooked = not_hooked();
    for hook in HOOKS {
        let symbol = hook.symbol;
        assert!(concerns_memory(symbol), "{symbol} escapes the pattern");
        assert!(!not_hooked.contains_key(symbol), "{symbol} is hooked");
    }
    if !binutils::present() {
        return;
    }
    let mut unexplained = Vec::new();
    for library in hooked_libraries() {
        let hooks = hooks_of(layer(&library));
        for name in binutils::exports(&library.path).into_keys() {
            let is_known = hooks.contains(&name) || not_hooked.contains_key(name.as_str());
            if concerns_memory(&name) && !is_known {
                unexplained.push(format!("{name} of {} {}", library.name(), library.version));
            }
        }
    }
    assert!(unexplained.is_empty(), "{unexplained:#?}");
}
