//! Makes certificates: a CA's, the collector's, the agents'. All as PEM, with keys of P-256.

use std::net::IpAddr;

use anyhow::{Context, bail};
use chrono::{Datelike, Days, Utc};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SanType,
};

/// How long a CA's certificate is good for, days: ten years.
pub const CA_DAYS: u64 = 3653;
/// How long the collector's and the agents' are, days, if nothing else is said.
pub const DAYS: u64 = 397;

/// A host's name becomes a file's name, and a line's part.
pub fn check_host(host: &str) -> anyhow::Result<()> {
    let is_good = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    let is_sane = (1..=253).contains(&host.len()) && host.bytes().all(is_good);
    if !is_sane || host.starts_with('.') || host.starts_with('-') {
        bail!(
            "host {host:?} is not 1 to 253 letters, digits, '-', '_' or '.'; give the name that the agent's rows have (`hostname`, or the agent's `host`)"
        );
    }
    Ok(())
}

/// A CA's certificate and key.
pub fn ca() -> anyhow::Result<(String, String)> {
    let mut params = CertificateParams::default();
    params.distinguished_name = rcgen::DistinguishedName::new();
    // A name of its own, so that one CA is not taken for another.
    let name = format!("vramscope CA {:016x}", rand::random::<u64>());
    params.distinguished_name.push(DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    lifetime(&mut params, CA_DAYS)?;
    let key = KeyPair::generate().context("failed to make a key")?;
    let certificate = params.self_signed(&key).context("failed to make the CA")?;
    Ok((certificate.pem(), key.serialize_pem()))
}

/// What signs, of a CA's certificate and key.
pub fn issuer(ca_pem: &str, ca_key: &str) -> anyhow::Result<Issuer<'static, KeyPair>> {
    let key = KeyPair::from_pem(ca_key).context("ca.key holds no usable key")?;
    Issuer::from_ca_cert_pem(ca_pem, key).context("ca.pem holds no usable certificate")
}

/// A collector's certificate and key, good for these names and addresses.
pub fn server(
    issuer: &Issuer<'_, KeyPair>,
    hosts: &[String],
    days: u64,
) -> anyhow::Result<(String, String)> {
    let mut params = CertificateParams::default();
    for host in hosts {
        let name = match host.parse::<IpAddr>() {
            Ok(address) => SanType::IpAddress(address),
            Err(_) => {
                check_host(host)?;
                SanType::DnsName(host.as_str().try_into().context("a name is not ASCII")?)
            }
        };
        params.subject_alt_names.push(name);
    }
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    leaf(issuer, params, "vramscope collector", days)
}

/// The certificate and key of a host's agent.
pub fn client(
    issuer: &Issuer<'_, KeyPair>,
    host: &str,
    days: u64,
) -> anyhow::Result<(String, String)> {
    let mut params = CertificateParams::default();
    let name = SanType::DnsName(host.try_into().context("the host's name is not ASCII")?);
    params.subject_alt_names.push(name);
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    // A common name has 64 characters at most; the DNS name is what counts.
    let common = if host.len() <= 64 {
        host
    } else {
        "vramscope agent"
    };
    leaf(issuer, params, common, days)
}

fn leaf(
    issuer: &Issuer<'_, KeyPair>,
    mut params: CertificateParams,
    common: &str,
    days: u64,
) -> anyhow::Result<(String, String)> {
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, common);
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.use_authority_key_identifier_extension = true;
    lifetime(&mut params, days)?;
    let key = KeyPair::generate().context("failed to make a key")?;
    let certificate = params
        .signed_by(&key, issuer)
        .context("failed to make a certificate")?;
    Ok((certificate.pem(), key.serialize_pem()))
}

/// From yesterday, as clocks differ, for so many days from today.
fn lifetime(params: &mut CertificateParams, days: u64) -> anyhow::Result<()> {
    let today = Utc::now().date_naive();
    let first = today.checked_sub_days(Days::new(1));
    let last = today.checked_add_days(Days::new(days));
    let (Some(first), Some(last)) = (first, last.filter(|last| last.year() < 9999)) else {
        bail!("{days} days reach beyond the calendar; choose fewer");
    };
    let day = |date: chrono::NaiveDate| {
        let (month, day) = (date.month() as u8, date.day() as u8);
        rcgen::date_time_ymd(date.year(), month, day)
    };
    params.not_before = day(first);
    params.not_after = day(last);
    Ok(())
}
