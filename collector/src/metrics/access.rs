//! Whom the doors turned away, and the files of certificates and credentials.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

use super::DoorLabels;

/// Whether a file that changed could be read.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ReloadLabels {
    /// ok, or failed: what was in force before still is.
    pub outcome: &'static str,
}

/// See the module's text.
#[derive(Debug, Default)]
pub struct AccessMetrics {
    /// Wrong tokens and passwords, by door.
    pub denied: Family<DoorLabels, Counter>,
    /// Connections that were closed because no TLS came about, by door.
    pub handshakes_failed: Family<DoorLabels, Counter>,
    /// Batches and calls of agents in another one's name.
    pub impostors: Counter,
    /// Files read anew.
    pub reloads: Family<ReloadLabels, Counter>,
    /// When the collector's certificate ends, seconds since 1970; 0 without TLS.
    pub certificate_expires: Gauge,
}

impl AccessMetrics {
    pub(super) fn register(&self, registry: &mut Registry) {
        registry.register(
            "access_denied",
            "Wrong tokens and passwords, by door",
            self.denied.clone(),
        );
        registry.register(
            "tls_handshakes_failed",
            "Connections closed because no TLS came about, by door",
            self.handshakes_failed.clone(),
        );
        registry.register(
            "access_impostors",
            "Batches and calls of agents in another one's name",
            self.impostors.clone(),
        );
        registry.register(
            "access_reloads",
            "Files of certificates and credentials that changed, by whether they could be read",
            self.reloads.clone(),
        );
        registry.register_with_unit(
            "tls_certificate_expires",
            "When the collector's certificate ends, since 1970; 0 without TLS",
            Unit::Seconds,
            self.certificate_expires.clone(),
        );
    }
}
