//! What single calls of the driver cost a program: batches of each, in any number of threads at once, at orders.
//!
//! The process prints `{"ready":true}` and then answers every line on its standard input with one line, ns of each call by batch:
//!
//! ```text
//! {"batches":3}
//! {"batches":{"pointer_attribute":[61.2,60.8,61.0],"launch":[2210.0,2190.0,2204.0]}}
//! ```

use std::{
    collections::BTreeMap,
    ffi::{c_int, c_void},
    io::{BufRead as _, Write as _},
    ptr,
    sync::Barrier,
    thread,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use gpumux_cuda::{Context, Device, DeviceBuffer, Driver, Result};
use serde::Deserialize;

use crate::{Calls, kernels::Gpu};

/// Memory that is allocated and freed.
const PIECE: usize = 2 << 20;
/// A batch ends after so long, or earlier: while it runs, all threads call.
const BATCH: Duration = Duration::from_millis(5);
/// How many calls are made between two looks at the clock.
const BETWEEN: u32 = 20;
/// Attributes: the kind of memory, the address on the device, and the device.
const KIND: c_int = 2;
const DEVICE_POINTER: c_int = 3;
const ORDINAL: c_int = 9;

/// One line of orders.
#[derive(Clone, Copy, Debug, Deserialize)]
struct Order {
    batches: u32,
}

/// A thread's device, and memory that it asks about.
struct Caller {
    driver: &'static Driver,
    gpu: Gpu,
    buffers: Vec<DeviceBuffer>,
}

/// A call by its name in the answer, and how often a batch makes it at most: launches no more than the driver queues.
struct Call {
    name: &'static str,
    most: u32,
    make: fn(&Caller) -> Result<()>,
}

const CALLS: &[Call] = &[
    Call {
        name: "pointer_attribute",
        most: 20_000,
        make: pointer_attribute,
    },
    Call {
        name: "pointer_attributes",
        most: 20_000,
        make: pointer_attributes,
    },
    Call {
        name: "address_range",
        most: 20_000,
        make: address_range,
    },
    Call {
        name: "alloc_free",
        most: 20_000,
        make: alloc_free,
    },
    Call {
        name: "alloc_free_async",
        most: 20_000,
        make: alloc_free_async,
    },
    Call {
        name: "launch_8_pointers",
        most: 200,
        make: Caller::launch,
    },
];

/// As Triton's launcher asks, of every pointer argument.
fn pointer_attribute(it: &Caller) -> Result<()> {
    let (mut found, address) = (0_u64, it.address());
    // SAFETY: the attribute has 64 bits.
    unsafe {
        it.driver
            .cuPointerGetAttribute((&raw mut found).cast(), DEVICE_POINTER, address)
    }
}

/// As the runtime asks for `cudaPointerGetAttributes`.
fn pointer_attributes(it: &Caller) -> Result<()> {
    let (mut kind, mut ordinal, mut found) = (0_u32, 0_i32, 0_u64);
    let which = [KIND, DEVICE_POINTER, ORDINAL];
    let mut data: [*mut c_void; 3] = [
        (&raw mut kind).cast(),
        (&raw mut found).cast(),
        (&raw mut ordinal).cast(),
    ];
    // SAFETY: three attributes of these lengths.
    unsafe {
        it.driver
            .cuPointerGetAttributes(3, which.as_ptr(), data.as_mut_ptr(), it.address())
    }
}

fn address_range(it: &Caller) -> Result<()> {
    let (mut base, mut bytes) = (0, 0);
    // SAFETY: two places to write.
    unsafe {
        it.driver
            .cuMemGetAddressRange_v2(&raw mut base, &raw mut bytes, it.address())
    }
}

fn alloc_free(it: &Caller) -> Result<()> {
    let mut address = 0;
    // SAFETY: a place to write, and memory that nothing uses.
    unsafe {
        it.driver.cuMemAlloc_v2(&raw mut address, PIECE)?;
        it.driver.cuMemFree_v2(address)
    }
}

fn alloc_free_async(it: &Caller) -> Result<()> {
    let mut address = 0;
    // SAFETY: as above; null is the default stream.
    unsafe {
        it.driver
            .cuMemAllocAsync(&raw mut address, PIECE, ptr::null_mut())?;
        it.driver.cuMemFreeAsync(address, ptr::null_mut())
    }
}

impl Caller {
    fn new(context: &Context) -> anyhow::Result<Self> {
        context.make_current()?;
        let buffers = (0..8).map(|_| DeviceBuffer::new(context, PIECE));
        let made = Self {
            driver: Driver::get()?,
            gpu: Gpu::on(context)?,
            buffers: buffers.collect::<Result<_>>()?,
        };
        // The first time compiles and makes pools.
        for call in CALLS {
            made.batch(call, &Barrier::new(1))?;
        }
        Ok(made)
    }

    /// Inside of an allocation.
    fn address(&self) -> u64 {
        self.buffers[0].address() + 512
    }

    fn launch(&self) -> Result<()> {
        let mut addresses = [0; 8];
        for (place, buffer) in addresses.iter_mut().zip(&self.buffers) {
            *place = buffer.address();
        }
        self.gpu.pointers(addresses)
    }

    /// ns of a call, of one batch that all threads begin at the same time.
    fn batch(&self, call: &Call, together: &Barrier) -> Result<f64> {
        together.wait();
        let (begin, mut times, mut made) = (Instant::now(), 0, Ok(()));
        while made.is_ok() && times < call.most && begin.elapsed() < BATCH {
            made = (0..BETWEEN).try_for_each(|_| (call.make)(self));
            times += BETWEEN;
        }
        let ns = begin.elapsed().as_secs_f64() * 1e9 / f64::from(times);
        // All of them go on with the next, also where one has failed.
        together.wait();
        made?;
        self.gpu.context.synchronize()?;
        Ok(ns)
    }

    /// ns of every call, in the order of [`CALLS`], by batch.
    fn serve(&self, order: Order, together: &Barrier) -> Result<Vec<Vec<f64>>> {
        let of = |call| {
            let all: Vec<_> = (0..order.batches)
                .map(|_| self.batch(call, together))
                .collect();
            all.into_iter().collect()
        };
        let all: Vec<_> = CALLS.iter().map(of).collect();
        all.into_iter().collect()
    }
}

/// The means of all threads, by batch.
fn means(threads: &[Vec<Vec<f64>>]) -> BTreeMap<&'static str, Vec<f64>> {
    let of = |(n, call): (usize, &Call)| {
        let batches = 0..threads[0][n].len();
        let mean = |batch| {
            let sum: f64 = threads.iter().map(|it| it[n][batch]).sum();
            sum / threads.len() as f64
        };
        (call.name, batches.map(mean).collect())
    };
    CALLS.iter().enumerate().map(of).collect()
}

/// Serves orders until the standard input ends.
pub(crate) fn calls(args: &Calls) -> anyhow::Result<()> {
    let device = Device::get(args.device).with_context(|| format!("device {}", args.device))?;
    let context = Context::primary(device).context("cannot create a context")?;
    let callers: Vec<Caller> = (0..args.threads)
        .map(|_| Caller::new(&context))
        .collect::<anyhow::Result<_>>()?;
    let mut out = std::io::stdout().lock();
    let mut answer = |value: serde_json::Value| {
        writeln!(out, "{value}")?;
        out.flush()
    };
    answer(serde_json::json!({"ready": true}))?;
    for line in std::io::stdin().lock().lines() {
        let order: Order = serde_json::from_str(&line?).context("an order")?;
        let together = Barrier::new(callers.len());
        let serve = |caller: &Caller| {
            let current = context.make_current();
            // Also after a failure: the others wait for this thread with every batch.
            let found = caller.serve(order, &together);
            current.and(found)
        };
        let found = thread::scope(|scope| {
            let serve = &serve;
            let threads = callers.iter().map(|it| scope.spawn(move || serve(it)));
            let threads: Vec<_> = threads.collect();
            let answers = threads
                .into_iter()
                .map(|it| it.join().ok().context("a thread has panicked"));
            answers
                .map(|it| Ok(it??))
                .collect::<anyhow::Result<Vec<_>>>()
        })?;
        answer(serde_json::json!({"batches": means(&found)}))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answer_has_the_mean_of_all_threads_by_batch() {
        let thread = |ns: f64| vec![vec![ns, ns + 1.0]; CALLS.len()];
        let found = means(&[thread(10.0), thread(20.0)]);
        assert_eq!(found.len(), CALLS.len());
        assert_eq!(found["pointer_attribute"], [15.0, 16.0]);
    }
}
