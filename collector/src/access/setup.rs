//! Makes what [`Access`](super::Access) reads: a CA, certificates, the file of users and tokens.
//!
//! ```text
//! DIR/ca.pem ca.key            the CA; the key is needed to make certificates, not to serve
//! DIR/server.pem server.key    the collector's
//! DIR/agents/HOST.pem HOST.key an agent's, to be carried to its host
//! DIR/credentials.toml         users and tokens
//! DIR/collector.toml           what `serve --config` takes
//! ```
//!
//! Invariants:
//! - a file is readable by its owner only from the moment it has bytes, and is written under
//!   another name first: who reads it reads all of it;
//! - nothing is overwritten without being told to;
//! - a secret is shown once and kept nowhere in the clear, but for the keys.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use rcgen::{Issuer, KeyPair};

use super::certificates::{self, DAYS};
use super::credentials::{Credentials, Digest, Entries, TokenEntry, UserEntry, new_token};
use super::scram::Verifier;
use super::{Role, credentials, random_password};
use crate::folder::sync_dir;

/// A folder with all of it.
#[derive(Debug, Clone)]
pub struct Folder {
    dir: PathBuf,
}

/// What [`Folder::init`] made.
#[derive(Debug)]
pub struct Made {
    /// The first administrator's token: the only time that it can be seen.
    pub token: String,
    /// Names that the collector's certificate is good for.
    pub hosts: Vec<String>,
}

/// Whether existing certificates may be replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Existing {
    /// That is an error.
    Keep,
    /// They may.
    Replace,
}

impl Folder {
    /// The folder, there or not.
    pub fn new(dir: &Path) -> Folder {
        Folder {
            dir: dir.to_path_buf(),
        }
    }

    /// A file in it.
    pub fn file(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// An agent's certificate and key.
    pub fn agent_files(&self, host: &str) -> (PathBuf, PathBuf) {
        let agents = self.dir.join("agents");
        (
            agents.join(format!("{host}.pem")),
            agents.join(format!("{host}.key")),
        )
    }

    /// Makes everything for a collector that is reached under `hosts`.
    pub fn init(&self, hosts: &[String]) -> anyhow::Result<Made> {
        make_private_dir(&self.dir)?;
        let _lock = self.lock()?;
        for name in [
            "ca.pem",
            "ca.key",
            "server.pem",
            "server.key",
            "credentials.toml",
            "collector.toml",
        ] {
            let path = self.file(name);
            if path.symlink_metadata().is_ok() {
                bail!(
                    "{} is there already and stays as it is; choose another --dir, or see `vramscope-collector server-certificate`, `user` and `token` for changes",
                    path.display()
                );
            }
        }
        let mut all: Vec<String> = Vec::new();
        for host in hosts
            .iter()
            .map(String::as_str)
            .chain(["localhost", "127.0.0.1", "::1"])
        {
            if !all.iter().any(|known| known == host) {
                all.push(host.to_string());
            }
        }
        let dir = std::path::absolute(&self.dir).context("failed to find the current folder")?;
        let config = config_file(&dir);
        let (ca_pem, ca_key) = certificates::ca()?;
        let issuer = certificates::issuer(&ca_pem, &ca_key)?;
        let (pem, key) = certificates::server(&issuer, &all, DAYS)?;
        let token = new_token("admin");
        let entries = Entries {
            tokens: vec![TokenEntry {
                name: "admin".to_string(),
                role: Role::Admin,
                namespaces: None,
                sha256: Digest::of(&token).to_string(),
            }],
            ..Entries::default()
        };
        // The credentials last: with them the folder is whole.
        for (name, text) in [
            ("ca.pem", &ca_pem),
            ("ca.key", &ca_key),
            ("server.pem", &pem),
            ("server.key", &key),
            ("collector.toml", &config),
        ] {
            write_private(&self.file(name), text, Existing::Keep)?;
        }
        self.save(&entries, Existing::Keep)?;
        Ok(Made { token, hosts: all })
    }

    /// Makes an agent's certificate; gives the files of certificate and key.
    pub fn agent(
        &self,
        host: &str,
        days: u64,
        existing: Existing,
    ) -> anyhow::Result<(PathBuf, PathBuf)> {
        certificates::check_host(host)?;
        let issuer = self.issuer()?;
        let (pem, key) = certificates::client(&issuer, host, days)?;
        make_private_dir(&self.dir.join("agents"))?;
        let (pem_path, key_path) = self.agent_files(host);
        write_pair((&pem_path, &pem), (&key_path, &key), existing)?;
        Ok((pem_path, key_path))
    }

    /// Makes the collector's certificate anew.
    pub fn server(&self, hosts: &[String], days: u64) -> anyhow::Result<()> {
        let issuer = self.issuer()?;
        let (pem, key) = certificates::server(&issuer, hosts, days)?;
        write_pair(
            (&self.file("server.pem"), &pem),
            (&self.file("server.key"), &key),
            Existing::Replace,
        )
    }

    fn issuer(&self) -> anyhow::Result<Issuer<'static, KeyPair>> {
        let read = |name: &str| {
            let path = self.file(name);
            std::fs::read_to_string(&path).with_context(|| {
                format!(
                    "failed to read {}; `vramscope-collector init` makes it",
                    path.display()
                )
            })
        };
        certificates::issuer(&read("ca.pem")?, &read("ca.key")?)
    }

    /// The users and tokens.
    pub fn entries(&self) -> anyhow::Result<Entries> {
        Entries::read(&self.file("credentials.toml"))
    }

    /// Changes the users and tokens; nobody else changes them meanwhile, and what would be wrong
    /// is not written.
    pub fn change<T>(
        &self,
        change: impl FnOnce(&mut Entries) -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        let _lock = self.lock()?;
        let mut entries = self.entries()?;
        let done = change(&mut entries)?;
        Credentials::of(&entries)?;
        self.save(&entries, Existing::Replace)?;
        Ok(done)
    }

    fn save(&self, entries: &Entries, existing: Existing) -> anyhow::Result<()> {
        const HEAD: &str = "# Users and tokens of vramscope-collector; it reads this file anew when it changes.\n\
             # Change it with `vramscope-collector user` and `vramscope-collector token`.\n\n";
        let text = toml::to_string(entries).context("failed to write TOML")?;
        let path = self.file("credentials.toml");
        write_private(&path, &format!("{HEAD}{text}"), existing)
    }

    fn lock(&self) -> anyhow::Result<File> {
        let path = self.file(".lock");
        let lock = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .open(&path)
            .with_context(|| format!("failed to open {}", path.display()))?;
        lock.lock()
            .with_context(|| format!("failed to lock {}", path.display()))?;
        Ok(lock)
    }
}

/// Adds a token; gives its text.
pub fn add_token(
    entries: &mut Entries,
    name: &str,
    role: Role,
    namespaces: Option<Vec<String>>,
) -> anyhow::Result<String> {
    check_new(entries, name)?;
    let token = new_token(name);
    entries.tokens.push(TokenEntry {
        name: name.to_string(),
        role,
        namespaces,
        sha256: Digest::of(&token).to_string(),
    });
    Ok(token)
}

/// Removes a token.
pub fn revoke_token(entries: &mut Entries, name: &str) -> anyhow::Result<()> {
    let before = entries.tokens.len();
    entries.tokens.retain(|token| token.name != name);
    if entries.tokens.len() == before {
        bail!("no token is named {name:?}; see `vramscope-collector token list`");
    }
    Ok(())
}

/// Adds a user; gives the password if none was given.
pub fn add_user(
    entries: &mut Entries,
    name: &str,
    role: Role,
    namespaces: Option<Vec<String>>,
    password: Option<String>,
) -> anyhow::Result<Option<String>> {
    check_new(entries, name)?;
    let (verifier, made) = verifier(password)?;
    entries.users.push(UserEntry {
        name: name.to_string(),
        role,
        namespaces,
        password: verifier,
    });
    Ok(made)
}

/// Gives a user another password; gives it if none was given.
pub fn set_password(
    entries: &mut Entries,
    name: &str,
    password: Option<String>,
) -> anyhow::Result<Option<String>> {
    let user = entries.users.iter_mut().find(|user| user.name == name);
    let user = user.with_context(|| no_user(name))?;
    let (verifier, made) = verifier(password)?;
    user.password = verifier;
    Ok(made)
}

/// Removes a user.
pub fn remove_user(entries: &mut Entries, name: &str) -> anyhow::Result<()> {
    let before = entries.users.len();
    entries.users.retain(|user| user.name != name);
    if entries.users.len() == before {
        bail!("{}", no_user(name));
    }
    Ok(())
}

/// Revokes the certificate in a PEM file; false if it was already.
pub fn revoke_certificate(entries: &mut Entries, path: &Path) -> anyhow::Result<bool> {
    let chain = super::tls::certificates(path)?;
    // An agent's file may have its CA's certificate behind its own.
    let digest = Digest::of(&chain[0]).to_string();
    if entries.revoked_certificates.contains(&digest) {
        return Ok(false);
    }
    entries.revoked_certificates.push(digest);
    Ok(true)
}

fn no_user(name: &str) -> String {
    format!("no user is named {name:?}; see `vramscope-collector user list`")
}

fn check_new(entries: &Entries, name: &str) -> anyhow::Result<()> {
    credentials::check_name(name).map_err(anyhow::Error::msg)?;
    let users = entries.users.iter().map(|user| &user.name);
    let mut names = users.chain(entries.tokens.iter().map(|token| &token.name));
    if names.any(|known| known == name) {
        bail!("{name:?} is the name of a user or token already; remove or revoke that first");
    }
    Ok(())
}

fn verifier(password: Option<String>) -> anyhow::Result<(String, Option<String>)> {
    let (password, made) = match password {
        Some(password) => (password, None),
        None => {
            let made = random_password();
            (made.clone(), Some(made))
        }
    };
    let verifier = Verifier::new(&password).map_err(anyhow::Error::msg)?;
    Ok((verifier.to_string(), made))
}

fn config_file(dir: &Path) -> String {
    let path = |name: &str| toml::Value::String(dir.join(name).display().to_string());
    format!(
        "# What `vramscope-collector serve --config` takes; `--print-config` shows every key.\n\n\
         # From other hosts too, with TLS and credentials.\n\
         listen = \"0.0.0.0:7717\"\n\
         http_listen = \"0.0.0.0:7718\"\n\
         postgres_listen = \"0.0.0.0:7719\"\n\
         tls_cert = {}\n\
         tls_key = {}\n\
         tls_client_ca = {}\n\
         credentials = {}\n",
        path("server.pem"),
        path("server.key"),
        path("ca.pem"),
        path("credentials.toml"),
    )
}

fn make_private_dir(dir: &Path) -> anyhow::Result<()> {
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(dir)
        .with_context(|| format!("failed to create {}", dir.display()))
}

/// Writes a certificate and its key; neither if one is there and is to be kept. A collector that
/// reads in between finds that they do not go together and keeps what it has.
fn write_pair(
    (pem_path, pem): (&Path, &str),
    (key_path, key): (&Path, &str),
    existing: Existing,
) -> anyhow::Result<()> {
    if existing == Existing::Keep {
        for path in [pem_path, key_path] {
            if path.symlink_metadata().is_ok() {
                bail!(
                    "{} is there already; --replace makes a new one",
                    path.display()
                );
            }
        }
    }
    write_private(key_path, key, existing)?;
    write_private(pem_path, pem, existing)
}

fn write_private(path: &Path, text: &str, existing: Existing) -> anyhow::Result<()> {
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(".new");
    let temporary = path.with_file_name(name);
    let write = || -> std::io::Result<()> {
        // Of a run that was killed; `create_new` below sees to it that the mode is right.
        match std::fs::remove_file(&temporary) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&temporary)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        match existing {
            Existing::Replace => std::fs::rename(&temporary, path)?,
            // A link fails where a rename would overwrite.
            Existing::Keep => {
                std::fs::hard_link(&temporary, path)?;
                std::fs::remove_file(&temporary)?;
            }
        }
        sync_dir(path.parent().unwrap_or(Path::new(".")))
    };
    let written = write();
    if written.is_err() {
        let _ = std::fs::remove_file(&temporary);
    }
    written.with_context(|| format!("failed to write {}", path.display()))
}
