//! The last hour of devices and tenants: a sample each second for five minutes, and one each ten seconds for the hour.
//!
//! Pure: the time is an argument. Memory is bounded: [`MAX_TENANTS`] series of 660 samples of 20 bytes for tenants, and
//! [`MAX_DEVICES`] of devices, which is less than 8 MB.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
};

use gpumux_core::{Micros, Ring, TenantId};

use crate::{api::types, clock::since_1970};

/// Most series of tenants, one for each device that a tenant uses.
pub(crate) const MAX_TENANTS: usize = 256;
/// Most series of devices.
pub(crate) const MAX_DEVICES: usize = 64;

/// Most samples of a series.
const MOST: usize = 360;

/// How far back, and how fine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Span {
    FiveMinutes,
    Hour,
}

impl Span {
    /// Seconds from one sample to the next.
    pub(crate) const fn step(self) -> u64 {
        match self {
            Self::FiveMinutes => 1,
            Self::Hour => 10,
        }
    }

    /// Samples that are kept.
    pub(crate) const fn samples(self) -> usize {
        match self {
            Self::FiveMinutes => 300,
            Self::Hour => MOST,
        }
    }
}

/// Values of one moment; NaN: not known.
type Sample<const N: usize> = [f32; N];

/// The last samples, one a step.
#[derive(Clone, Debug)]
struct Samples<const N: usize> {
    span: Span,
    /// The step after the last one.
    end: u64,
    samples: Ring<Sample<N>, MOST>,
}

impl<const N: usize> Samples<N> {
    const NONE: Sample<N> = [f32::NAN; N];

    fn new(span: Span) -> Self {
        Self {
            span,
            end: 0,
            samples: Ring::default(),
        }
    }

    /// Puts a step's sample, instead of the one that it has. Steps between are gaps; one before the last is too late.
    fn put(&mut self, step: u64, sample: Sample<N>) {
        let gap = step.saturating_sub(self.end);
        match step + 1 == self.end {
            true => drop(self.samples.pop()),
            false if step < self.end => return,
            false if self.samples.is_empty() => {}
            false => {
                let gap = gap.min(self.span.samples() as u64) as usize;
                self.samples.extend(std::iter::repeat_n(Self::NONE, gap));
            }
        }
        self.samples.push(sample);
        self.samples.keep(self.span.samples());
        self.end = step + 1;
    }

    fn get(&self, step: u64) -> Sample<N> {
        let back = self.end.checked_sub(step + 1);
        let at = back.and_then(|back| {
            self.samples
                .len()
                .checked_sub(usize::try_from(back).ok()? + 1)
        });
        at.map_or(Self::NONE, |at| self.samples[at])
    }
}

/// What is known of one subject at both spans.
#[derive(Clone, Debug)]
struct Series<const N: usize> {
    fine: Samples<N>,
    coarse: Samples<N>,
    /// The second of the last sample.
    last: u64,
}

impl<const N: usize> Series<N> {
    fn new() -> Self {
        Self {
            fine: Samples::new(Span::FiveMinutes),
            coarse: Samples::new(Span::Hour),
            last: 0,
        }
    }

    fn put(&mut self, second: u64, sample: Sample<N>) {
        self.fine.put(second, sample);
        let step = second / Span::Hour.step();
        let seconds = step * Span::Hour.step()..=second;
        let known: Vec<Sample<N>> = seconds.map(|second| self.fine.get(second)).collect();
        self.coarse.put(step, mean(&known));
        self.last = self.last.max(second);
    }

    /// A value's course over the span that ends with this second; `None` where it is not known.
    fn column(&self, span: Span, second: u64, column: usize) -> Vec<Option<f32>> {
        let ring = match span {
            Span::FiveMinutes => &self.fine,
            Span::Hour => &self.coarse,
        };
        let (last, samples) = (second / span.step(), span.samples() as u64);
        let value = |back: u64| {
            let value = last.checked_sub(back).map(|step| ring.get(step)[column]);
            value.filter(|value| !value.is_nan())
        };
        (0..samples).rev().map(value).collect()
    }

    fn has_expired(&self, second: u64) -> bool {
        let hour = Span::Hour.step() * Span::Hour.samples() as u64;
        self.last + hour <= second
    }
}

/// Of each value: the mean of those that are known.
fn mean<const N: usize>(samples: &[Sample<N>]) -> Sample<N> {
    std::array::from_fn(|column| {
        let known = samples
            .iter()
            .map(|it| it[column])
            .filter(|it| !it.is_nan());
        let (sum, count) = known.fold((0.0, 0), |(sum, count), it| (sum + it, count + 1));
        sum / count as f32
    })
}

/// What a tenant has, and had so far, on one device.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Look {
    pub(crate) tenant: TenantId,
    pub(crate) device: String,
    pub(crate) name: String,
    pub(crate) uid: u32,
    pub(crate) user: String,
    /// The MPS group of which it is a member.
    pub(crate) group: Option<String>,
    /// Device time received so far.
    pub(crate) received_us: f64,
    /// Time so far in which it had work and did not run.
    pub(crate) waited_us: f64,
    /// Bytes on the device, and on the host.
    pub(crate) memory: u64,
    pub(crate) swapped: u64,
    /// How often its memory was moved so far, either way.
    pub(crate) moves: u64,
}

#[derive(Clone, Debug)]
struct Track {
    /// When it was looked at last, and what it was.
    before: (Micros, Look),
    series: Series<5>,
}

/// See the module.
#[derive(Clone, Debug, Default)]
pub(crate) struct History {
    devices: BTreeMap<String, Series<4>>,
    tenants: BTreeMap<(TenantId, String), Track>,
    /// The second of the last look.
    second: u64,
    /// Tenants of the last look for which there was no room.
    left_out: usize,
}

impl History {
    /// Takes a sample of all devices, and of all tenants that live.
    pub(crate) fn record(
        &mut self,
        now: Micros,
        devices: &[(String, types::Readings)],
        looks: Vec<Look>,
    ) {
        let second = now.0 / 1_000_000;
        self.second = self.second.max(second);
        self.devices.retain(|_, series| !series.has_expired(second));
        self.tenants
            .retain(|_, track| !track.series.has_expired(second));
        for (uuid, readings) in devices {
            if self.devices.len() < MAX_DEVICES || self.devices.contains_key(uuid) {
                let series = self.devices.entry(uuid.clone()).or_insert_with(Series::new);
                series.put(second, of_device(readings));
            }
        }
        self.left_out = 0;
        for look in looks {
            let key = (look.tenant, look.device.clone());
            if let Some(track) = self.tenants.get_mut(&key) {
                track
                    .series
                    .put(second, of_tenant(&track.before, now, &look));
                track.before = (now, look);
            } else if self.has_room(second) {
                // What it received before is not known to belong to the last second.
                let mut series = Series::new();
                let before = (now, look);
                series.put(second, of_tenant(&before, now, &before.1));
                self.tenants.insert(key, Track { before, series });
            } else {
                self.left_out += 1;
            }
        }
    }

    /// Whether a tenant more can be taken, if need be instead of the one that ended first.
    fn has_room(&mut self, second: u64) -> bool {
        if self.tenants.len() < MAX_TENANTS {
            return true;
        }
        let ended = self
            .tenants
            .iter()
            .filter(|(_, it)| it.series.last < second.saturating_sub(1));
        let first = ended
            .min_by_key(|(_, it)| it.series.last)
            .map(|(key, _)| key.clone());
        first.is_some_and(|key| self.tenants.remove(&key).is_some())
    }

    /// All that is known; `now` in seconds since 1970 is the time of the last sample.
    pub(crate) fn answer(&self, span: Span, now: u64) -> types::History {
        let devices = self.devices.iter().map(|(device, series)| {
            let [utilization, temperature_c, power_w, memory_used] =
                std::array::from_fn(|column| series.column(span, self.second, column));
            types::DeviceHistory {
                device: device.clone(),
                utilization,
                temperature_c,
                power_w,
                memory_used,
            }
        });
        let tenants = self.tenants.values().map(
            |Track {
                 before: (_, look),
                 series,
             }| {
                let [received, waiting, memory, swapped, moves] =
                    std::array::from_fn(|column| series.column(span, self.second, column));
                let ago = self.second - series.last;
                types::TenantHistory {
                    id: look.tenant.0,
                    name: look.name.clone(),
                    uid: look.uid,
                    user: look.user.clone(),
                    device: look.device.clone(),
                    group: look.group.clone(),
                    ended_s_ago: Some(ago).filter(|ago| *ago > ENDED_AFTER),
                    received,
                    waiting,
                    memory,
                    swapped,
                    moves,
                }
            },
        );
        types::History {
            now,
            step_s: span.step(),
            samples: span.samples(),
            devices: devices.collect(),
            tenants: tenants.collect(),
            left_out: self.left_out,
        }
    }
}

/// A tenant without a sample for so many seconds has ended; a look may come late once.
const ENDED_AFTER: u64 = 2;

fn of_device(readings: &types::Readings) -> Sample<4> {
    let known = |value: Option<f64>| value.map_or(f32::NAN, |value| value as f32);
    [
        known(readings.utilization),
        known(readings.temperature_c.map(f64::from)),
        known(readings.power_w),
        known(readings.memory_used.map(|bytes| bytes as f64)),
    ]
}

/// What a tenant had from one look to the next.
fn of_tenant((then, before): &(Micros, Look), now: Micros, look: &Look) -> Sample<5> {
    let elapsed = now.saturating_sub(*then).0 as f64;
    let part = |so_far: f64, before: f64| match elapsed > 0.0 {
        // Thousandths are enough for a picture.
        true => (((so_far - before) / elapsed).clamp(0.0, 1.0) * 1000.0).round() as f32 / 1000.0,
        false => f32::NAN,
    };
    let moves = look.moves.saturating_sub(before.moves) as f64 / (elapsed / 1e6);
    [
        part(look.received_us, before.received_us),
        part(look.waited_us, before.waited_us),
        look.memory as f32,
        look.swapped as f32,
        if elapsed > 0.0 { moves as f32 } else { 0.0 },
    ]
}

/// The history, and the answer of each span that was made of its last sample.
#[derive(Default)]
pub(crate) struct Past(Mutex<(History, [Option<Arc<str>>; 2])>);

impl Past {
    pub(crate) fn record(
        &self,
        now: Micros,
        devices: &[(String, types::Readings)],
        looks: Vec<Look>,
    ) {
        let mut own = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        own.0.record(now, devices, looks);
        own.1 = [None, None];
    }

    /// As JSON, made once for all that ask between two samples.
    pub(crate) fn answer(&self, span: Span) -> Arc<str> {
        let mut own = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (history, made) = &mut *own;
        let made = &mut made[span as usize];
        let make = || {
            let answer = history.answer(span, since_1970().as_secs());
            // No map with odd keys is in it.
            serde_json::to_string(&answer).unwrap_or_default().into()
        };
        Arc::clone(made.get_or_insert_with(make))
    }
}

#[cfg(test)]
mod tests;
