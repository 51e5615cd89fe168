//! The file of users and tokens.
//!
//! ```toml
//! # SHA-256 of certificates (DER) that are not accepted any more, hexadecimal.
//! revoked_certificates = []
//!
//! [[users]]
//! name = "alice"
//! role = "read"                 # read or admin
//! namespaces = ["team-a"]       # without it: all
//! password = "SCRAM-SHA-256$16384:…"
//!
//! [[tokens]]
//! name = "grafana"
//! role = "read"
//! sha256 = "…"                  # of the token's whole text
//! ```
//!
//! Names are unique over both lists: a name is who somebody is.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;

use anyhow::{Context, bail};
use aws_lc_rs::constant_time::verify_slices_are_equal;
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::scram::{Exchange, Verifier, random};
use super::{Caller, Role};

/// What every token begins with, so that scanners for secrets find those that got astray.
pub const TOKEN_PREFIX: &str = "vramscope-token.";

/// SHA-256 of a secret or a certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Digest(pub [u8; 32]);

impl Digest {
    /// Of a text or bytes.
    pub fn of(bytes: impl AsRef<[u8]>) -> Digest {
        Digest(Sha256::digest(bytes.as_ref()).into())
    }

    /// Whether the other is the same, in constant time.
    pub fn is(&self, other: &Digest) -> bool {
        verify_slices_are_equal(&self.0, &other.0).is_ok()
    }
}

impl std::fmt::Display for Digest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl FromStr for Digest {
    type Err = String;

    fn from_str(text: &str) -> Result<Digest, String> {
        let wrong = || format!("{text:?} is not the 64 hexadecimal digits of a SHA-256");
        if text.len() != 64 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(wrong());
        }
        let mut bytes = [0; 32];
        for (byte, digits) in bytes.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
            let digits = std::str::from_utf8(digits).map_err(|_| wrong())?;
            *byte = u8::from_str_radix(digits, 16).map_err(|_| wrong())?;
        }
        Ok(Digest(bytes))
    }
}

/// 256 random bits as a text.
pub fn random_text() -> String {
    URL_SAFE_NO_PAD.encode(random::<32>())
}

/// A new token's text. Its name is in it, so that whoever finds one knows which to revoke.
pub fn new_token(name: &str) -> String {
    format!("{TOKEN_PREFIX}{name}.{}", random_text())
}

/// The file as it is written.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entries {
    /// SHA-256 of certificates that are not accepted any more.
    #[serde(default)]
    pub revoked_certificates: Vec<String>,
    /// People with passwords.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub users: Vec<UserEntry>,
    /// Programs and people with tokens.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tokens: Vec<TokenEntry>,
}

/// Somebody with a password.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UserEntry {
    /// Who they are.
    pub name: String,
    /// `read` or `admin`.
    pub role: Role,
    /// Namespaces whose rows they see; all without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespaces: Option<Vec<String>>,
    /// A [`Verifier`].
    pub password: String,
}

/// Somebody with a token.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TokenEntry {
    /// Who they are.
    pub name: String,
    /// `read` or `admin`.
    pub role: Role,
    /// Namespaces whose rows they see; all without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespaces: Option<Vec<String>>,
    /// SHA-256 of the token.
    pub sha256: String,
}

impl Entries {
    /// Reads a file.
    pub fn read(path: &Path) -> anyhow::Result<Entries> {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("failed to read credentials {}", path.display()))?;
        // Not the parser's own text: it quotes lines of the file.
        toml::from_str(&text).map_err(|error| {
            anyhow::anyhow!(
                "credentials {} are wrong: {}",
                path.display(),
                error.message()
            )
        })
    }
}

/// Says what is wrong with a name.
pub fn check_name(name: &str) -> Result<(), String> {
    let is_good = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.@".contains(&byte);
    if (1..=64).contains(&name.len()) && name.bytes().all(is_good) {
        return Ok(());
    }
    let name: String = name.chars().take(80).collect();
    Err(format!(
        "name {name:?} is not 1 to 64 letters, digits, '-', '_', '.' or '@'"
    ))
}

/// The entries, ready to be asked.
#[derive(Debug)]
pub struct Credentials {
    users: HashMap<Arc<str>, (Caller, Verifier)>,
    tokens: HashMap<Arc<str>, (Caller, Digest)>,
    revoked: HashSet<Digest>,
    /// What decoys are made of; of this process only.
    secret: [u8; 32],
}

impl Default for Credentials {
    fn default() -> Credentials {
        Credentials {
            users: HashMap::new(),
            tokens: HashMap::new(),
            revoked: HashSet::new(),
            secret: random(),
        }
    }
}

impl Credentials {
    /// Reads a file and checks it whole.
    pub fn load(path: &Path) -> anyhow::Result<Credentials> {
        let entries = Entries::read(path)?;
        Credentials::of(&entries).with_context(|| format!("in credentials {}", path.display()))
    }

    /// Checks entries.
    pub fn of(entries: &Entries) -> anyhow::Result<Credentials> {
        let mut credentials = Credentials::default();
        let mut names = HashSet::new();
        for user in &entries.users {
            let caller = caller(
                &user.name,
                user.role,
                user.namespaces.as_deref(),
                &mut names,
            )?;
            let verifier = user
                .password
                .parse()
                .map_err(|problem| anyhow::anyhow!("password of {:?}: {problem}", user.name))?;
            let name = Arc::clone(&caller.name);
            credentials.users.insert(name, (caller, verifier));
        }
        for token in &entries.tokens {
            let caller = caller(
                &token.name,
                token.role,
                token.namespaces.as_deref(),
                &mut names,
            )?;
            let digest = token
                .sha256
                .parse()
                .map_err(|problem| anyhow::anyhow!("sha256 of {:?}: {problem}", token.name))?;
            let name = Arc::clone(&caller.name);
            credentials.tokens.insert(name, (caller, digest));
        }
        for text in &entries.revoked_certificates {
            let digest = text.parse().map_err(anyhow::Error::msg);
            let digest = digest.context("in revoked_certificates")?;
            credentials.revoked.insert(digest);
        }
        Ok(credentials)
    }

    /// How decoys look must not change when the file does.
    pub(super) fn with_secret_of(mut self, before: &Credentials) -> Credentials {
        self.secret = before.secret;
        self
    }

    /// The user of that name, and a mark that another password changes.
    pub fn user(&self, name: &str) -> Option<(Caller, Digest)> {
        let (caller, verifier) = self.users.get(name)?;
        Some((caller.clone(), Digest::of(verifier.to_string())))
    }

    /// Who shows this token.
    pub fn token(&self, bearer: &str) -> Option<Caller> {
        let (name, _) = bearer.strip_prefix(TOKEN_PREFIX)?.rsplit_once('.')?;
        let (caller, digest) = self.tokens.get(name)?;
        digest.is(&Digest::of(bearer)).then(|| caller.clone())
    }

    /// Who has this name and password.
    pub fn password(&self, user: &str, password: &str) -> Option<Caller> {
        match self.users.get(user) {
            Some((caller, verifier)) => verifier.fits(password).then(|| caller.clone()),
            None => {
                // Takes as long as for a user who is there.
                Verifier::decoy(user, &self.secret).fits(password);
                None
            }
        }
    }

    /// One SCRAM exchange with somebody who says they are `user`.
    pub fn scram(&self, user: &str) -> Exchange {
        match self.users.get(user) {
            Some((caller, verifier)) => Exchange::new(verifier.clone(), Some(caller.clone())),
            None => Exchange::new(Verifier::decoy(user, &self.secret), None),
        }
    }

    /// Whether a certificate was revoked.
    pub fn is_revoked(&self, der: &[u8]) -> bool {
        !self.revoked.is_empty() && self.revoked.contains(&Digest::of(der))
    }
}

fn caller(
    name: &str,
    role: Role,
    namespaces: Option<&[String]>,
    names: &mut HashSet<String>,
) -> anyhow::Result<Caller> {
    check_name(name).map_err(anyhow::Error::msg)?;
    if !names.insert(name.to_string()) {
        bail!("name {name:?} is there twice; users and tokens need names of their own");
    }
    if role == Role::Ingest {
        bail!("{name:?} has role ingest, which only agents' certificates have; use read or admin");
    }
    if role == Role::Admin && namespaces.is_some() {
        bail!("{name:?} has role admin and namespaces; an admin sees all, use role read");
    }
    Ok(Caller {
        name: Arc::from(name),
        role,
        namespaces: namespaces.map(Arc::from),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// SHA-256 of "abc", from FIPS 180-2.
    #[test]
    fn digests_are_sha256() {
        let digest = Digest::of("abc");
        let text = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(digest.to_string(), text);
        assert_eq!(text.parse(), Ok(digest));
        assert!("ba78".parse::<Digest>().is_err());
        assert!("+".repeat(64).parse::<Digest>().is_err());
    }

    fn entries(text: &str) -> anyhow::Result<Credentials> {
        Credentials::of(&toml::from_str(text).unwrap())
    }

    #[test]
    fn slips_are_named() {
        let token = |name: &str, more: &str| {
            format!(
                "[[tokens]]\nname = \"{name}\"\nsha256 = \"{}\"\n{more}\n",
                "0".repeat(64)
            )
        };
        let fails = |text: String, part: &str| {
            let error = format!("{:#}", entries(&text).unwrap_err());
            assert!(error.contains(part), "{error}");
        };
        fails(token("a b", "role = \"read\""), "name \"a b\"");
        fails(token("a", "role = \"ingest\""), "only agents' certificates");
        fails(
            token("a", "role = \"read\"") + &token("a", "role = \"admin\""),
            "\"a\" is there twice",
        );
        fails(
            token("a", "role = \"admin\"\nnamespaces = [\"x\"]"),
            "an admin sees all",
        );
        fails(
            "[[users]]\nname = \"u\"\nrole = \"read\"\npassword = \"secret\"".into(),
            "password of \"u\"",
        );
        fails(
            "revoked_certificates = [\"12\"]".into(),
            "revoked_certificates",
        );
    }

    #[test]
    fn a_token_is_its_owner_and_nobody_else() {
        let text = new_token("ci.read");
        let entry = |token: &str| {
            format!(
                "[[tokens]]\nname = \"ci.read\"\nrole = \"read\"\nnamespaces = [\"team-a\"]\nsha256 = \"{}\"",
                Digest::of(token)
            )
        };
        let credentials = entries(&entry(&text)).unwrap();
        let caller = credentials.token(&text).unwrap();
        assert_eq!((&*caller.name, caller.role), ("ci.read", Role::Read));
        assert_eq!(
            caller.namespaces.as_deref(),
            Some(&["team-a".to_string()][..])
        );
        assert_eq!(credentials.token(&new_token("ci.read")), None);
        assert_eq!(credentials.token(&text[..text.len() - 1]), None);
        assert_eq!(credentials.token(""), None);
    }
}
