//! Passwords, as SCRAM-SHA-256 has them (RFC 5802, RFC 7677).
//!
//! What is kept is the verifier that PostgreSQL keeps too, in its spelling:
//! `SCRAM-SHA-256$ITERATIONS:SALT$STOREDKEY:SERVERKEY`. Neither the password nor anything that
//! could stand for it can be had from that, other than by guessing.
//!
//! Passwords are printable ASCII, where RFC 4013's preparation changes nothing.

use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;

use aws_lc_rs::constant_time::verify_slices_are_equal;
use aws_lc_rs::{digest, hmac, pbkdf2, rand};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use super::{Caller, Denied};

/// The one mechanism, as SASL names it.
pub const MECHANISM: &str = "SCRAM-SHA-256";
/// Rounds for new passwords; RFC 7677 asks for 4096 at least.
pub const ITERATIONS: u32 = 16_384;
const FEWEST_ITERATIONS: u32 = 4096;
const KEY: usize = 32;
const SALT: usize = 16;

/// What is kept of a password.
#[derive(Clone, PartialEq, Eq)]
pub struct Verifier {
    iterations: NonZeroU32,
    salt: Vec<u8>,
    stored_key: [u8; KEY],
    server_key: [u8; KEY],
}

impl fmt::Debug for Verifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Verifier(..)")
    }
}

impl Verifier {
    /// Of a new password. The error says what is wrong with it.
    pub fn new(password: &str) -> Result<Verifier, String> {
        check(password)?;
        Ok(Verifier::with(
            password,
            random::<SALT>().to_vec(),
            NonZeroU32::new(ITERATIONS).unwrap_or(NonZeroU32::MIN),
        ))
    }

    fn with(password: &str, salt: Vec<u8>, iterations: NonZeroU32) -> Verifier {
        let mut salted = [0; KEY];
        pbkdf2::derive(
            pbkdf2::PBKDF2_HMAC_SHA256,
            iterations,
            &salt,
            password.as_bytes(),
            &mut salted,
        );
        let client_key = sign(&salted, b"Client Key");
        Verifier {
            iterations,
            salt,
            stored_key: sha256(&client_key),
            server_key: sign(&salted, b"Server Key"),
        }
    }

    /// For a user that is not there: looks like a user's, is the same each time, and fits no
    /// password.
    pub fn decoy(user: &str, secret: &[u8; KEY]) -> Verifier {
        let salt = sign(secret, user.as_bytes());
        Verifier {
            iterations: NonZeroU32::new(ITERATIONS).unwrap_or(NonZeroU32::MIN),
            salt: salt[..SALT].to_vec(),
            stored_key: random(),
            server_key: random(),
        }
    }

    /// Whether this is the password. Costs the same either way.
    pub fn fits(&self, password: &str) -> bool {
        let shown = Verifier::with(password, self.salt.clone(), self.iterations);
        verify_slices_are_equal(&shown.stored_key, &self.stored_key).is_ok()
    }
}

/// Says what is wrong with a password that somebody wants to set.
pub fn check(password: &str) -> Result<(), String> {
    if !password.bytes().all(|byte| (b' '..=b'~').contains(&byte)) {
        return Err(
            "the password has characters beyond printable ASCII; leave them out".to_string(),
        );
    }
    match password.len() {
        12..=256 => Ok(()),
        length => Err(format!(
            "the password has {length} characters; it takes 12 to 256"
        )),
    }
}

impl fmt::Display for Verifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{MECHANISM}${}:{}${}:{}",
            self.iterations,
            STANDARD.encode(&self.salt),
            STANDARD.encode(self.stored_key),
            STANDARD.encode(self.server_key)
        )
    }
}

impl FromStr for Verifier {
    type Err = String;

    fn from_str(text: &str) -> Result<Verifier, String> {
        let wrong = || {
            format!(
                "not a verifier as in {MECHANISM}$ITERATIONS:SALT$STOREDKEY:SERVERKEY; make one with `vramscope-collector user add`"
            )
        };
        let rest = text
            .strip_prefix(MECHANISM)
            .and_then(|rest| rest.strip_prefix('$'))
            .ok_or_else(wrong)?;
        let (head, keys) = rest.split_once('$').ok_or_else(wrong)?;
        let (iterations, salt) = head.split_once(':').ok_or_else(wrong)?;
        let (stored, server) = keys.split_once(':').ok_or_else(wrong)?;
        let bytes = |text: &str| STANDARD.decode(text).map_err(|_| wrong());
        let key = |text: &str| <[u8; KEY]>::try_from(bytes(text)?).map_err(|_| wrong());
        let iterations: NonZeroU32 = iterations.parse().map_err(|_| wrong())?;
        if iterations.get() < FEWEST_ITERATIONS {
            return Err(format!(
                "{iterations} iterations are fewer than {FEWEST_ITERATIONS}; set the password anew"
            ));
        }
        let verifier = Verifier {
            iterations,
            salt: bytes(salt)?,
            stored_key: key(stored)?,
            server_key: key(server)?,
        };
        if verifier.salt.len() < 8 {
            return Err(wrong());
        }
        Ok(verifier)
    }
}

/// The server's side of one exchange: [`Exchange::first`], then [`Exchange::last`].
#[derive(Debug)]
pub struct Exchange {
    verifier: Verifier,
    /// `None`: there is no such user, and no proof is good.
    caller: Option<Caller>,
    nonce: String,
    heard: Option<Heard>,
}

#[derive(Debug)]
struct Heard {
    client_first_bare: String,
    server_first: String,
    /// Header of the first message, which the last one has to repeat.
    binding: String,
    nonce: String,
}

impl Exchange {
    pub(super) fn new(verifier: Verifier, caller: Option<Caller>) -> Exchange {
        Exchange {
            verifier,
            caller,
            nonce: STANDARD.encode(random::<18>()),
            heard: None,
        }
    }

    /// Takes the client's first message (`n,,n=…,r=NONCE`; its user name is not looked at, as
    /// PostgreSQL's clients leave it empty) and gives the server's first.
    pub fn first(&mut self, client_first: &[u8]) -> Result<String, Denied> {
        let text = std::str::from_utf8(client_first).map_err(|_| Denied::Wrong)?;
        let mut parts = text.splitn(3, ',');
        let (Some(flag), Some(authzid), Some(bare)) = (parts.next(), parts.next(), parts.next())
        else {
            return Err(Denied::Wrong);
        };
        // Binding to the channel (`p=`) is not offered, so nobody may ask for it.
        if !matches!(flag, "n" | "y") || text.len() > 1024 {
            return Err(Denied::Wrong);
        }
        let client_nonce = bare
            .split(',')
            .nth(1)
            .and_then(|nonce| nonce.strip_prefix("r="))
            .filter(|nonce| !nonce.is_empty())
            .ok_or(Denied::Wrong)?;
        let nonce = format!("{client_nonce}{}", self.nonce);
        let server_first = format!(
            "r={nonce},s={},i={}",
            STANDARD.encode(&self.verifier.salt),
            self.verifier.iterations
        );
        self.heard = Some(Heard {
            client_first_bare: bare.to_string(),
            server_first: server_first.clone(),
            binding: STANDARD.encode(format!("{flag},{authzid},")),
            nonce,
        });
        Ok(server_first)
    }

    /// Takes the client's last message and gives who that is, and the server's last message.
    pub fn last(self, client_last: &[u8]) -> Result<(Caller, String), Denied> {
        let heard = self.heard.ok_or(Denied::Wrong)?;
        let text = std::str::from_utf8(client_last).map_err(|_| Denied::Wrong)?;
        let (without_proof, proof) = text.rsplit_once(",p=").ok_or(Denied::Wrong)?;
        let mut fields = without_proof.split(',');
        let binding = fields.next().and_then(|field| field.strip_prefix("c="));
        let nonce = fields.next().and_then(|field| field.strip_prefix("r="));
        let proof = STANDARD.decode(proof).map_err(|_| Denied::Wrong)?;
        let proof = <[u8; KEY]>::try_from(proof).map_err(|_| Denied::Wrong)?;
        if binding != Some(&heard.binding) || nonce != Some(&heard.nonce) {
            return Err(Denied::Wrong);
        }
        let message = format!(
            "{},{},{without_proof}",
            heard.client_first_bare, heard.server_first
        );
        let signature = sign(&self.verifier.stored_key, message.as_bytes());
        let mut client_key = proof;
        client_key
            .iter_mut()
            .zip(signature)
            .for_each(|(key, signed)| *key ^= signed);
        let fits = verify_slices_are_equal(&sha256(&client_key), &self.verifier.stored_key);
        match (fits, self.caller) {
            (Ok(()), Some(caller)) => {
                let signature = sign(&self.verifier.server_key, message.as_bytes());
                Ok((caller, format!("v={}", STANDARD.encode(signature))))
            }
            _ => Err(Denied::Wrong),
        }
    }
}

/// Random bytes from the operating system's generator.
pub(super) fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    // It fails only where the kernel has no random numbers, and then nothing here may go on.
    rand::fill(&mut bytes).expect("random numbers from the kernel");
    bytes
}

fn sign(key: &[u8], message: &[u8]) -> [u8; KEY] {
    let tag = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, key), message);
    let mut signed = [0; KEY];
    signed.copy_from_slice(tag.as_ref());
    signed
}

fn sha256(bytes: &[u8]) -> [u8; KEY] {
    let mut hash = [0; KEY];
    hash.copy_from_slice(digest::digest(&digest::SHA256, bytes).as_ref());
    hash
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::access::Role;

    fn pencil() -> Verifier {
        let salt = STANDARD.decode("W22ZaJ0SNY7soEsUEjb6gQ==").unwrap();
        Verifier::with("pencil", salt, NonZeroU32::new(4096).unwrap())
    }

    fn exchange() -> Exchange {
        let user = Caller {
            name: Arc::from("user"),
            role: Role::Read,
            namespaces: None,
        };
        let mut exchange = Exchange::new(pencil(), Some(user));
        exchange.nonce = "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0".to_string();
        exchange
    }

    const FIRST: &[u8] = b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO";
    const LAST: &str = "c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=";

    /// The exchange that RFC 7677 prints in its section 3.
    #[test]
    fn the_exchange_of_the_rfc() {
        let mut exchange = exchange();
        assert_eq!(
            exchange.first(FIRST).unwrap(),
            "r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
        );
        let (caller, last) = exchange.last(LAST.as_bytes()).unwrap();
        assert_eq!(&*caller.name, "user");
        assert_eq!(last, "v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=");
    }

    #[test]
    fn whatever_differs_is_denied() {
        let spoil = |from: &str, to: &str| {
            let mut exchange = exchange();
            exchange.first(FIRST).unwrap();
            exchange.last(LAST.replace(from, to).as_bytes())
        };
        assert!(spoil("p=d", "p=e").is_err());
        assert!(spoil("c=biws", "c=eSws").is_err());
        assert!(spoil("k0", "k1").is_err());
        assert!(spoil(",p=", ",q=").is_err());
        for first in [
            "",
            "n,,",
            "p=tls-server-end-point,,n=,r=a",
            "n,,n=user",
            "n,,n=user,r=",
        ] {
            assert!(exchange().first(first.as_bytes()).is_err(), "{first}");
        }
        assert!(exchange().last(LAST.as_bytes()).is_err());
        // The right proof for a user that is not there.
        let mut nobody = exchange();
        nobody.caller = None;
        nobody.first(FIRST).unwrap();
        assert!(nobody.last(LAST.as_bytes()).is_err());
    }

    #[test]
    fn a_verifier_reads_back_and_knows_its_password_only() {
        let verifier = Verifier::new("correct horse battery").unwrap();
        let text = verifier.to_string();
        assert!(!text.contains("horse"));
        let verifier: Verifier = text.parse().unwrap();
        assert!(verifier.fits("correct horse battery"));
        assert!(!verifier.fits("correct horse batterY"));
        assert!(Verifier::new("short").is_err());
        assert!(Verifier::new("correct horse b\u{e4}ttery").is_err());
        let few = text.replace("16384", "1000");
        assert!(few.parse::<Verifier>().is_err());
    }
}
