//! Which agent writes, and that it writes as itself.
//!
//! Rules, where credentials are configured:
//! - an agent shows a certificate of the clients' CA; the host that it names is the only one
//!   whose rows the agent may send: the batch says that host, and so does each row;
//! - each row says the batch's agent_id, and an agent_id belongs to the host that used it first,
//!   for ever ([`Bindings`]). So a certificate that was stolen on one host cannot speak for an
//!   agent of another;
//! - a certificate that is revoked ends a stream that it opened at the next batch.
//!
//! Without credentials nothing of this holds, and only loopback is listened on.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, bail};
use arrow::array::{AsArray, RecordBatch};

use super::{Access, Caller, Denied};
use crate::metrics::METRICS;

/// Who sends batches or answers requests on one stream.
#[derive(Clone)]
pub struct Agent {
    access: Access,
    /// The certificate and the host that it names; `None` where no credentials are configured.
    certificate: Option<(Arc<[u8]>, Arc<str>)>,
}

/// An agent that writes as another one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Impostor {
    /// The batch is of another host.
    #[error(
        "the certificate is of host {certificate:?}, and the batch says host {claimed:?}; an agent writes only as itself"
    )]
    Host {
        /// What the certificate says.
        certificate: Arc<str>,
        /// What the batch says.
        claimed: String,
    },
    /// The agent_id belongs to another host.
    #[error(
        "agent_id {agent:?} belongs to host {owner:?}, and the certificate is of host {certificate:?}; give the agent a new spool folder, or see docs/security.md"
    )]
    Bound {
        /// The agent_id.
        agent: String,
        /// Whose it is.
        owner: Arc<str>,
        /// What the certificate says.
        certificate: Arc<str>,
    },
    /// A row says something else than the batch.
    #[error(
        "a row has {column} {found:?}, and the batch says {claimed:?}; an agent writes only as itself"
    )]
    Row {
        /// `host` or `agent_id`.
        column: &'static str,
        /// What the row says.
        found: String,
        /// What the batch says.
        claimed: String,
    },
}

impl Agent {
    /// Who a call is from, as its guard has found out. Without a guard it is refused.
    pub fn of<T>(call: &tonic::Request<T>) -> Result<Agent, tonic::Status> {
        let agent = call.extensions().get::<Agent>().cloned();
        agent.ok_or_else(|| tonic::Status::internal("nobody has looked at who calls"))
    }

    /// Lets an agent in by its certificate.
    pub(super) fn admit(
        access: &Access,
        certificate: Option<Arc<[u8]>>,
    ) -> Result<(Caller, Agent), Denied> {
        let (caller, certificate) = match (access.required(), certificate) {
            (false, _) => (Caller::on_loopback(), None),
            (true, None) => return Err(Denied::NoCertificate),
            (true, Some(der)) => {
                let caller = access.certificate(&der).ok_or(Denied::Certificate)?;
                let host = Arc::clone(&caller.name);
                (caller, Some((der, host)))
            }
        };
        let agent = Agent {
            access: access.clone(),
            certificate,
        };
        Ok((caller, agent))
    }

    /// Whether the certificate is still good. To be asked on every message of a stream.
    pub fn still_welcome(&self) -> Result<(), Denied> {
        match &self.certificate {
            Some((der, _)) if self.access.certificate(der).is_none() => Err(Denied::Certificate),
            _ => Ok(()),
        }
    }

    /// Whether it may write as this agent of this host. The first time, this makes the agent_id
    /// its own, durably.
    pub async fn check(&self, agent: &str, host: &str) -> anyhow::Result<Result<(), Impostor>> {
        if self.certificate.is_none() {
            return Ok(Ok(()));
        }
        let (this, agent, host) = (self.clone(), agent.to_string(), host.to_string());
        // It may wait for the disk.
        let task = tokio::task::spawn_blocking(move || this.check_now(&agent, &host));
        let checked = task.await.context("failed to look the agent up")??;
        if let Err(impostor) = &checked {
            Agent::alarm(impostor);
        }
        Ok(checked)
    }

    fn check_now(&self, agent: &str, host: &str) -> anyhow::Result<Result<(), Impostor>> {
        let Some((_, named)) = &self.certificate else {
            return Ok(Ok(()));
        };
        if !named.eq_ignore_ascii_case(host) {
            return Ok(Err(Impostor::Host {
                certificate: Arc::clone(named),
                claimed: host.chars().take(256).collect(),
            }));
        }
        let Some(bindings) = self.access.bindings() else {
            return Ok(Ok(()));
        };
        let owner = bindings.owner(agent, named)?;
        if owner.eq_ignore_ascii_case(named) {
            return Ok(Ok(()));
        }
        Ok(Err(Impostor::Bound {
            agent: agent.to_string(),
            owner,
            certificate: Arc::clone(named),
        }))
    }

    /// What each row of a batch has to say; `None` where nobody has to show who they are.
    pub fn claim(&self, agent: &str, host: &str) -> Option<Claim> {
        self.certificate.as_ref().map(|_| Claim {
            agent: agent.to_string(),
            host: host.to_string(),
        })
    }

    /// Writes an impostor down.
    pub fn alarm(impostor: &Impostor) {
        METRICS.access.impostors.inc();
        tracing::error!("an agent writes as another: {impostor}");
    }
}

/// Whom a batch says that its rows are of.
#[derive(Debug, Clone)]
pub struct Claim {
    agent: String,
    host: String,
}

impl Claim {
    /// Whether each row says the batch's agent_id, and its host if the table has hosts.
    pub fn check(&self, rows: &RecordBatch) -> Result<(), Impostor> {
        for (column, claimed) in [("agent_id", &self.agent), ("host", &self.host)] {
            let Some(values) = rows
                .column_by_name(column)
                .and_then(|values| values.as_string_opt::<i32>())
            else {
                continue;
            };
            let other = values.iter().find(|value| *value != Some(claimed));
            if let Some(found) = other {
                return Err(Impostor::Row {
                    column,
                    found: found.unwrap_or("NULL").chars().take(256).collect(),
                    claimed: claimed.clone(),
                });
            }
        }
        Ok(())
    }
}

/// Which agent_id belongs to which host: a file of lines `AGENT_ID HOST`, only ever appended to.
#[derive(Debug)]
pub struct Bindings {
    path: PathBuf,
    inside: Mutex<(File, HashMap<String, Arc<str>>)>,
}

/// Name of the file inside a data folder.
pub const BINDINGS_FILE: &str = "_agents";

impl Bindings {
    /// Opens the file of a data folder. A last line that was cut by a crash was told to nobody,
    /// and is removed.
    pub fn open(data: &Path) -> anyhow::Result<Bindings> {
        let path = data.join(BINDINGS_FILE);
        let is_new = !path.exists();
        let mut file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .open(&path)
            .with_context(|| format!("failed to open {}", path.display()))?;
        if is_new {
            crate::folder::sync_dir(data)
                .with_context(|| format!("failed to sync {}", data.display()))?;
        }
        let mut text = String::new();
        file.read_to_string(&mut text)
            .with_context(|| format!("failed to read {}", path.display()))?;
        let whole = text.rfind('\n').map_or(0, |end| end + 1);
        if whole < text.len() {
            file.set_len(whole as u64)
                .with_context(|| format!("failed to cut {}", path.display()))?;
        }
        let mut owners = HashMap::new();
        for (number, line) in text[..whole].lines().enumerate() {
            let Some((agent, host)) = line.split_once(' ') else {
                bail!(
                    "{}, line {}: {line:?} is not `AGENT_ID HOST`; correct it, or remove the line",
                    path.display(),
                    number + 1
                );
            };
            let first = owners.entry(agent.to_string());
            first.or_insert_with(|| Arc::from(host));
        }
        Ok(Bindings {
            path,
            inside: Mutex::new((file, owners)),
        })
    }

    /// Whose an agent_id is; from now on `host`'s if it was nobody's.
    fn owner(&self, agent: &str, host: &Arc<str>) -> anyhow::Result<Arc<str>> {
        let mut inside = self.inside.lock().unwrap_or_else(PoisonError::into_inner);
        let (file, owners) = &mut *inside;
        if let Some(owner) = owners.get(agent) {
            return Ok(Arc::clone(owner));
        }
        let before = file.seek(SeekFrom::End(0));
        let write = before.and_then(|before| {
            let written = file
                .write_all(format!("{agent} {host}\n").as_bytes())
                .and_then(|()| file.sync_data());
            if written.is_err() {
                // Half a line must not stand before the next one.
                let _ = file.set_len(before);
            }
            written
        });
        write.with_context(|| format!("failed to write {}", self.path.display()))?;
        tracing::info!(agent, %host, "agent_id belongs to this host from now on");
        owners.insert(agent.to_string(), Arc::clone(host));
        Ok(Arc::clone(host))
    }
}

#[cfg(test)]
mod tests {
    use arrow::array::StringArray;
    use arrow::datatypes::{DataType, Field, Schema};

    use super::*;

    #[test]
    fn an_agent_id_is_the_first_hosts_also_after_a_restart_and_a_torn_line() {
        let data = tempfile::tempdir().unwrap();
        let (a, b) = (Arc::from("gpu-1"), Arc::from("gpu-2"));
        let bindings = Bindings::open(data.path()).unwrap();
        assert_eq!(bindings.owner("x", &a).unwrap(), a);
        assert_eq!(bindings.owner("x", &b).unwrap(), a);
        assert_eq!(bindings.owner("y", &b).unwrap(), b);
        drop(bindings);
        let path = data.path().join(BINDINGS_FILE);
        assert_eq!(
            std::fs::read_to_string(&path).unwrap(),
            "x gpu-1\ny gpu-2\n"
        );
        std::fs::write(&path, "x gpu-1\ny gpu-2\nz gp").unwrap();
        let bindings = Bindings::open(data.path()).unwrap();
        assert_eq!(bindings.owner("x", &b).unwrap(), a);
        assert_eq!(bindings.owner("z", &b).unwrap(), b);
        drop(bindings);
        assert_eq!(
            std::fs::read_to_string(&path).unwrap(),
            "x gpu-1\ny gpu-2\nz gpu-2\n"
        );
        std::fs::write(&path, "nonsense\n").unwrap();
        let error = format!("{:#}", Bindings::open(data.path()).unwrap_err());
        assert!(error.contains("line 1"), "{error}");
    }

    #[test]
    fn rows_of_another_host_or_agent_are_found() {
        let rows = |agents: Vec<&str>, hosts: Vec<Option<&str>>| {
            let schema = Schema::new(vec![
                Field::new("agent_id", DataType::Utf8, false),
                Field::new("host", DataType::Utf8, true),
            ]);
            RecordBatch::try_new(
                Arc::new(schema),
                vec![
                    Arc::new(StringArray::from(agents)),
                    Arc::new(StringArray::from(hosts)),
                ],
            )
            .unwrap()
        };
        let claim = Claim {
            agent: "a".into(),
            host: "h".into(),
        };
        let check = |rows| claim.check(&rows);
        assert_eq!(
            check(rows(vec!["a", "a"], vec![Some("h"), Some("h")])),
            Ok(())
        );
        let other = check(rows(vec!["a", "b"], vec![Some("h"), Some("h")])).unwrap_err();
        assert!(other.to_string().contains("agent_id \"b\""), "{other}");
        let other = check(rows(vec!["a", "a"], vec![Some("h"), Some("g")])).unwrap_err();
        assert!(other.to_string().contains("host \"g\""), "{other}");
        assert!(check(rows(vec!["a", "a"], vec![Some("h"), None])).is_err());
    }
}
