//! The commands `init`, `agent-certificate`, `server-certificate`, `revoke-certificate`, `user`
//! and `token`.
//!
//! What is secret goes to standard output alone on its line, once; everything else that is said
//! goes to standard error, so that scripts can take the one without the other. (`init` is for
//! people and prints all to standard output.)

use std::io::Read;
use std::path::PathBuf;

use anyhow::{Context, bail};
use clap::{Args, Subcommand, ValueEnum};
use serde::Serialize;

use super::Role;
use super::certificates::DAYS;
use super::setup::{self, Existing, Folder};

/// Examples of the command.
pub const INIT_EXAMPLES: &str = "Examples:
  vramscope-collector init --dir /etc/vramscope --host collector.example.com
  vramscope-collector serve --config /etc/vramscope/collector.toml --data /var/lib/vramscope

Nothing that is there is overwritten. The token is shown once.";

/// Makes a CA, the collector's certificate and a first administrator's token
#[derive(Args)]
pub struct Init {
    #[command(flatten)]
    dir: Dir,
    /// Name or address under which agents and people reach the collector, besides localhost;
    /// may be given several times
    #[arg(long = "host", value_name = "NAME")]
    hosts: Vec<String>,
}

#[derive(Args)]
struct Dir {
    /// Folder of certificates and credentials
    #[arg(long, value_name = "DIR", env = "VRAMSCOPE_COLLECTOR_ACCESS")]
    dir: PathBuf,
}

impl Dir {
    fn folder(&self) -> Folder {
        Folder::new(&self.dir)
    }
}

/// Examples of the command.
pub const AGENT_EXAMPLES: &str = "Examples:
  vramscope-collector agent-certificate --dir /etc/vramscope --name gpu-17
  vramscope-collector agent-certificate --dir /etc/vramscope --name gpu-17 --replace

The name is that of the host as the agent's rows have it: `hostname`, or the agent's key `host`.
An agent with this certificate can write rows of this host and of no other.";

/// Makes the certificate by which an agent shows which host it is of
#[derive(Args)]
pub struct AgentCertificate {
    #[command(flatten)]
    dir: Dir,
    /// Host of the agent
    #[arg(long, value_name = "HOST")]
    name: String,
    /// How long it is good for
    #[arg(long, value_name = "DAYS", default_value_t = DAYS)]
    days: u64,
    /// Put it in the place of one that is there
    #[arg(long)]
    replace: bool,
}

/// Examples of the command.
pub const SERVER_EXAMPLES: &str = "Examples:
  vramscope-collector server-certificate --dir /etc/vramscope --host collector.example.com

A running collector takes it within seconds; connections that are open stay.";

/// Makes the collector's certificate anew, before the old one ends or for other names
#[derive(Args)]
pub struct ServerCertificate {
    #[command(flatten)]
    dir: Dir,
    /// Name or address under which the collector is reached, besides localhost; may be given
    /// several times
    #[arg(long = "host", value_name = "NAME", required = true)]
    hosts: Vec<String>,
    /// How long it is good for
    #[arg(long, value_name = "DAYS", default_value_t = DAYS)]
    days: u64,
}

/// Examples of the command.
pub const REVOKE_EXAMPLES: &str = "Examples:
  vramscope-collector revoke-certificate --dir /etc/vramscope /etc/vramscope/agents/gpu-17.pem

A running collector ends the agent's stream within seconds.";

/// Takes an agent's certificate back, after its key was stolen for example
#[derive(Args)]
pub struct RevokeCertificate {
    #[command(flatten)]
    dir: Dir,
    /// The certificate, PEM
    #[arg(value_name = "FILE")]
    certificate: PathBuf,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum PersonRole {
    /// Ask questions
    Read,
    /// Ask questions, and see and end those of others
    Admin,
}

impl From<PersonRole> for Role {
    fn from(role: PersonRole) -> Role {
        match role {
            PersonRole::Read => Role::Read,
            PersonRole::Admin => Role::Admin,
        }
    }
}

#[derive(Args)]
struct Rights {
    /// What they may do
    #[arg(long, value_enum, default_value = "read")]
    role: PersonRole,
    /// Kubernetes namespace whose rows they see; may be given several times. Without it: all
    #[arg(long = "namespace", value_name = "NAME")]
    namespaces: Vec<String>,
}

impl Rights {
    fn namespaces(&self) -> Option<Vec<String>> {
        (!self.namespaces.is_empty()).then(|| self.namespaces.clone())
    }
}

/// Examples of the command.
pub const USER_EXAMPLES: &str = "Examples:
  vramscope-collector user add --dir /etc/vramscope alice
  vramscope-collector user add --dir /etc/vramscope bob --namespace team-a --password-stdin < file
  vramscope-collector user password --dir /etc/vramscope alice
  vramscope-collector user remove --dir /etc/vramscope alice
  vramscope-collector user list --dir /etc/vramscope --json

A running collector follows within seconds.";

/// Adds, removes and lists users: people with a password
#[derive(Args)]
pub struct User {
    #[command(subcommand)]
    what: UserCommand,
}

#[derive(Subcommand)]
enum UserCommand {
    /// Adds a user; prints a new password, unless one is given
    Add {
        #[command(flatten)]
        dir: Dir,
        /// Who they are
        name: String,
        #[command(flatten)]
        rights: Rights,
        /// Read the password from standard input, up to the end of its first line
        #[arg(long)]
        password_stdin: bool,
    },
    /// Gives a user another password; prints it, unless one is given
    Password {
        #[command(flatten)]
        dir: Dir,
        /// Who they are
        name: String,
        /// Read the password from standard input, up to the end of its first line
        #[arg(long)]
        password_stdin: bool,
    },
    /// Removes a user
    Remove {
        #[command(flatten)]
        dir: Dir,
        /// Who they are
        name: String,
    },
    /// Lists the users
    List {
        #[command(flatten)]
        dir: Dir,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
}

/// Examples of the command.
pub const TOKEN_EXAMPLES: &str = "Examples:
  vramscope-collector token add --dir /etc/vramscope grafana
  vramscope-collector token add --dir /etc/vramscope team-a-ci --namespace team-a
  vramscope-collector token revoke --dir /etc/vramscope grafana
  vramscope-collector token list --dir /etc/vramscope

A running collector follows within seconds.";

/// Adds, revokes and lists tokens, for programs
#[derive(Args)]
pub struct Token {
    #[command(subcommand)]
    what: TokenCommand,
}

#[derive(Subcommand)]
enum TokenCommand {
    /// Adds a token and prints it: the only time that it can be seen
    Add {
        #[command(flatten)]
        dir: Dir,
        /// Who they are
        name: String,
        #[command(flatten)]
        rights: Rights,
    },
    /// Takes a token back
    Revoke {
        #[command(flatten)]
        dir: Dir,
        /// Who they are
        name: String,
    },
    /// Lists the tokens, without what is secret
    List {
        #[command(flatten)]
        dir: Dir,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
}

impl Init {
    /// Does it.
    pub fn run(&self) -> anyhow::Result<()> {
        let made = self.dir.folder().init(&self.hosts)?;
        let dir = self.dir.dir.display();
        let at = self.hosts.first().map_or("localhost", String::as_str);
        eprintln!(
            "made in {dir}, readable by you alone:
  ca.pem, ca.key          the CA. ca.key is needed to make certificates, not to serve:
                          keep it elsewhere if others use this machine
  server.pem, server.key  the collector's certificate, for {hosts}
  credentials.toml        users and tokens, as hashes
  collector.toml          configuration for `serve`

next:
  vramscope-collector serve --config {dir}/collector.toml --data /var/lib/vramscope
  vramscope-collector agent-certificate --dir {dir} --name HOST      (for each GPU host)
  vramscope-agent serve --collector https://{at}:7717 --ca ca.pem --cert HOST.pem --key HOST.key
  vramscope-collector user add --dir {dir} NAME                      (for each person)

administrator's token, shown this once:",
            hosts = made.hosts.join(", "),
        );
        println!("{}", made.token);
        Ok(())
    }
}

impl AgentCertificate {
    /// Does it.
    pub fn run(&self) -> anyhow::Result<()> {
        let folder = self.dir.folder();
        let existing = if self.replace {
            Existing::Replace
        } else {
            Existing::Keep
        };
        let (pem, key) = folder.agent(&self.name, self.days, existing)?;
        println!("{}\n{}", pem.display(), key.display());
        eprintln!(
            "copy these two and {} to {}, and name them to its agent: ca, cert and key, with collector = \"https://…\"",
            folder.file("ca.pem").display(),
            self.name
        );
        Ok(())
    }
}

impl ServerCertificate {
    /// Does it.
    pub fn run(&self) -> anyhow::Result<()> {
        let mut hosts = self.hosts.clone();
        for host in ["localhost", "127.0.0.1", "::1"] {
            if !hosts.iter().any(|known| known == host) {
                hosts.push(host.to_string());
            }
        }
        let folder = self.dir.folder();
        folder.server(&hosts, self.days)?;
        println!("{}", folder.file("server.pem").display());
        Ok(())
    }
}

impl RevokeCertificate {
    /// Does it.
    pub fn run(&self) -> anyhow::Result<()> {
        let folder = self.dir.folder();
        let is_new =
            folder.change(|entries| setup::revoke_certificate(entries, &self.certificate))?;
        let path = self.certificate.display();
        if is_new {
            eprintln!("revoked {path}");
        } else {
            eprintln!("{path} was revoked before");
        }
        Ok(())
    }
}

/// Somebody, as `list` prints them.
#[derive(Serialize)]
struct Listed<'a> {
    name: &'a str,
    role: Role,
    namespaces: Option<&'a [String]>,
}

impl Listed<'_> {
    fn print(all: &[Listed<'_>], json: bool) -> anyhow::Result<()> {
        if json {
            println!("{}", serde_json::to_string_pretty(all)?);
            return Ok(());
        }
        let width = all.iter().map(|one| one.name.len()).max().unwrap_or(0);
        for one in all {
            let sees = match one.namespaces {
                Some(namespaces) => namespaces.join(", "),
                None => "all namespaces".to_string(),
            };
            println!("{:width$}  {:5}  {sees}", one.name, one.role.name());
        }
        Ok(())
    }
}

impl User {
    /// Does it.
    pub fn run(&self) -> anyhow::Result<()> {
        match &self.what {
            UserCommand::Add {
                dir,
                name,
                rights,
                password_stdin,
            } => {
                let password = read_password(*password_stdin)?;
                let made = dir.folder().change(|entries| {
                    let role = rights.role.into();
                    setup::add_user(entries, name, role, rights.namespaces(), password)
                })?;
                show_password(name, made);
            }
            UserCommand::Password {
                dir,
                name,
                password_stdin,
            } => {
                let password = read_password(*password_stdin)?;
                let made = dir
                    .folder()
                    .change(|entries| setup::set_password(entries, name, password))?;
                show_password(name, made);
            }
            UserCommand::Remove { dir, name } => {
                dir.folder()
                    .change(|entries| setup::remove_user(entries, name))?;
                eprintln!("removed {name}");
            }
            UserCommand::List { dir, json } => {
                let entries = dir.folder().entries()?;
                let users = entries.users.iter().map(|user| Listed {
                    name: &user.name,
                    role: user.role,
                    namespaces: user.namespaces.as_deref(),
                });
                Listed::print(&users.collect::<Vec<_>>(), *json)?;
            }
        }
        Ok(())
    }
}

impl Token {
    /// Does it.
    pub fn run(&self) -> anyhow::Result<()> {
        match &self.what {
            TokenCommand::Add { dir, name, rights } => {
                let token = dir.folder().change(|entries| {
                    setup::add_token(entries, name, rights.role.into(), rights.namespaces())
                })?;
                eprintln!("token of {name}, shown this once:");
                println!("{token}");
            }
            TokenCommand::Revoke { dir, name } => {
                dir.folder()
                    .change(|entries| setup::revoke_token(entries, name))?;
                eprintln!("revoked the token of {name}");
            }
            TokenCommand::List { dir, json } => {
                let entries = dir.folder().entries()?;
                let tokens = entries.tokens.iter().map(|token| Listed {
                    name: &token.name,
                    role: token.role,
                    namespaces: token.namespaces.as_deref(),
                });
                Listed::print(&tokens.collect::<Vec<_>>(), *json)?;
            }
        }
        Ok(())
    }
}

fn show_password(name: &str, made: Option<String>) {
    match made {
        Some(password) => {
            eprintln!("password of {name}, shown this once:");
            println!("{password}");
        }
        None => eprintln!("{name} has the password given"),
    }
}

fn read_password(wanted: bool) -> anyhow::Result<Option<String>> {
    if !wanted {
        return Ok(None);
    }
    let mut text = String::new();
    std::io::stdin()
        .take(4096)
        .read_to_string(&mut text)
        .context("failed to read the password from standard input")?;
    let password = text.lines().next().unwrap_or_default();
    if password.is_empty() {
        bail!("standard input holds no password");
    }
    Ok(Some(password.to_string()))
}
