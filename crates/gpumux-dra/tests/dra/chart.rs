//! The Helm chart.
